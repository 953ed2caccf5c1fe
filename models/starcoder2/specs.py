"""StarCoder2: LayerNorm and an MLP without a gate."""

from __future__ import annotations

from modelopt_lite.models.registry import register
from modelopt_lite.models.specs import ModelSpec, NamingSpec, PTQSpec

# Classes, module names, norms and who reads them: measured on built models, transformers 5.14.1 and
# 5.24.0. Names on disk: files written by save_pretrained of the same releases.
SPEC = register(
    ModelSpec(
        model_type="starcoder2",
        min_transformers_version="4.57",
        ptq_spec=PTQSpec(
            layer_names=("Starcoder2DecoderLayer",),
            fused_linears=(("q_proj", "k_proj", "v_proj"),),
            norm_feeds=(
                ("input_layernorm", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
                ("post_attention_layernorm", ("mlp.c_fc",)),
            ),
        ),
        naming_spec=NamingSpec(
            layer_linear_names=("q_proj", "k_proj", "v_proj", "o_proj", "c_fc", "c_proj"),
            is_tied=True,
        ),
    )
)
