"""Phi-3 and Phi-4: q, k and v stored as one matrix, gate and up as another."""

from __future__ import annotations

from modelopt_lite.models.registry import register
from modelopt_lite.models.specs import ModelSpec, NamingSpec, PTQSpec

# Module names, norms and who reads them: measured on built models, transformers 4.57.6, 5.14.1
# and 5.24.0.
SPEC = register(
    ModelSpec(
        model_type="phi3",
        min_transformers_version="4.57",
        ptq_spec=PTQSpec(
            layer_names=("Phi3DecoderLayer",),
            # No fused_linears: what engines join is joined on disk already.
            norm_feeds=(
                ("input_layernorm", ("self_attn.qkv_proj",)),
                ("post_attention_layernorm", ("mlp.gate_up_proj",)),
            ),
            # vLLM reads qkv_proj.k_scale where there is no k_proj.
            key_value_names=("qkv_proj", "qkv_proj"),
        ),
        naming_spec=NamingSpec(
            layer_linear_names=("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
        ),
    )
)
