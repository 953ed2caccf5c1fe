"""GLM-4 (0414): gate and up in one matrix, norms before and after attention and MLP."""

from __future__ import annotations

from modelopt_lite.models.registry import register
from modelopt_lite.models.specs import ModelSpec, NamingSpec, PTQSpec

# Classes, module names, norms and who reads them: measured on built models, transformers 5.14.1 and
# 5.24.0. Names on disk: files written by save_pretrained of the same releases.
SPEC = register(
    ModelSpec(
        model_type="glm4",
        min_transformers_version="4.57",
        ptq_spec=PTQSpec(
            layer_names=("Glm4DecoderLayer",),
            fused_linears=(("q_proj", "k_proj", "v_proj"),),
            norm_feeds=(
                ("input_layernorm", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
                ("post_attention_layernorm", ("mlp.gate_up_proj",)),
            ),
        ),
        naming_spec=NamingSpec(
            layer_linear_names=("q_proj", "k_proj", "v_proj", "o_proj", "gate_up_proj", "down_proj")
        ),
    )
)
