"""Gemma 3n, text only: per-layer embeddings, several streams of hidden states."""

from __future__ import annotations

from modelopt_lite.models.registry import register
from modelopt_lite.models.specs import ModelSpec, NamingSpec, PTQSpec

# Classes, module names, norms and who reads them: measured on built models, transformers 5.14.1 and
# 5.24.0. Names on disk: files written by save_pretrained of the same releases.
SPEC = register(
    ModelSpec(
        model_type="gemma3n_text",
        min_transformers_version="4.57",
        ptq_spec=PTQSpec(
            layer_names=("Gemma3nTextDecoderLayer",),
            skip_modules=("**", "*embed_tokens_per_layer", "*per_layer_model_projection"),
            fused_linears=(("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")),
            norm_feeds=(
                (
                    "input_layernorm",
                    (
                        "laurel.linear_left",
                        "self_attn.q_proj",
                        "self_attn.k_proj",
                        "self_attn.v_proj",
                    ),
                ),
                ("pre_feedforward_layernorm", ("mlp.gate_proj", "mlp.up_proj")),
            ),
        ),
        naming_spec=NamingSpec(
            layer_linear_names=(
                "q_proj",
                "k_proj",
                "v_proj",
                "o_proj",
                "correction_coefs",
                "linear_left",
                "linear_right",
                "modality_router",
                "per_layer_input_gate",
                "per_layer_projection",
                "prediction_coefs",
                "gate_proj",
                "up_proj",
                "down_proj",
            ),
            is_tied=True,
        ),
    )
)
