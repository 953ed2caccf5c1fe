"""OLMo hybrid: layers of gated delta nets or attention."""

from __future__ import annotations

from modelopt_lite.models.registry import register
from modelopt_lite.models.specs import (
    GATED_LINEARS,
    ModelSpec,
    NamingSpec,
    PTQSpec,
)

# Classes, module names, norms and who reads them: measured on built models, transformers 5.14.1 and
# 5.24.0. Names on disk: files written by save_pretrained of the same releases.
# post_attention_layernorm comes before the MLP in layers of one kind and after attention in the
# other: it is left out.
SPEC = register(
    ModelSpec(
        model_type="olmo_hybrid",
        min_transformers_version="5.3",
        ptq_spec=PTQSpec(
            layer_names=(
                "OlmoHybridAttentionDecoderLayer",
                "OlmoHybridLinearAttentionDecoderLayer",
            ),
            skip_modules=("*.k_conv1d", "*.q_conv1d", "*.v_conv1d"),
            fused_linears=(("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")),
            norm_feeds=(
                (
                    "input_layernorm",
                    (
                        "linear_attn.q_proj",
                        "linear_attn.k_proj",
                        "linear_attn.v_proj",
                        "linear_attn.b_proj",
                        "linear_attn.a_proj",
                        "linear_attn.g_proj",
                    ),
                ),
                (
                    "attention_layer_norm",
                    (
                        "linear_attn.q_proj",
                        "linear_attn.k_proj",
                        "linear_attn.v_proj",
                        "linear_attn.b_proj",
                        "linear_attn.a_proj",
                        "linear_attn.g_proj",
                    ),
                ),
            ),
            # Loaded as bfloat16, these stay float32.
            keep_dtype_names=("A_log",),
        ),
        naming_spec=NamingSpec(layer_linear_names=(*GATED_LINEARS, "a_proj", "b_proj", "g_proj")),
    )
)
