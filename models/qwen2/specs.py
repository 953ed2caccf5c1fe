"""Qwen2 and Qwen2.5: Llama with biases on q, k and v."""

from __future__ import annotations

from modelopt_lite.models.registry import register
from modelopt_lite.models.specs import GATED_LINEARS, ModelSpec, NamingSpec, PTQSpec

# Module names, norms and who reads them: measured on built models, transformers 4.57.6, 5.14.1
# and 5.24.0.
SPEC = register(
    ModelSpec(
        model_type="qwen2",
        min_transformers_version="4.57",
        ptq_spec=PTQSpec(
            layer_names=("Qwen2DecoderLayer",),
            fused_linears=(("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")),
            norm_feeds=(
                ("input_layernorm", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
                ("post_attention_layernorm", ("mlp.gate_proj", "mlp.up_proj")),
            ),
        ),
        naming_spec=NamingSpec(layer_linear_names=GATED_LINEARS),
    )
)
