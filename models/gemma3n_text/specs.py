"""Gemma 3n, text only: per-layer embeddings, several streams of hidden states."""

from __future__ import annotations

from modelopt_lite.models.cohere.specs import SPEC as COHERE
from modelopt_lite.models.registry import register
from modelopt_lite.models.variants import variant

# Classes, module names, norms and who reads them: measured on built models, transformers 5.14.1 and
# 5.24.0. Names on disk: files written by save_pretrained of the same releases.
# input_layernorm feeds more than q, k and v: a fold into it changed the output.
SPEC = register(
    variant(
        COHERE,
        "gemma3n_text",
        ptq_spec={
            "layer_names": ("Gemma3nTextDecoderLayer",),
            "skip_modules": ("*altup*", "*embed_tokens_per_layer", "*per_layer_model_projection"),
            "norm_feeds": (("pre_feedforward_layernorm", ("mlp.gate_proj", "mlp.up_proj")),),
        },
        naming_spec={
            "layer_linear_names": (
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
            )
        },
    )
)
