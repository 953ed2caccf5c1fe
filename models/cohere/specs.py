"""Cohere Command R: attention and MLP both read one LayerNorm, side by side."""

from __future__ import annotations

from modelopt_lite.models.llama.specs import SPEC as LLAMA
from modelopt_lite.models.registry import register
from modelopt_lite.models.variants import variant

# Classes, module names, norms and who reads them: measured on built models, transformers 5.14.1 and
# 5.24.0. Names on disk: files written by save_pretrained of the same releases.
SPEC = register(
    variant(
        LLAMA,
        "cohere",
        export_spec=None,
        ptq_spec={
            "layer_names": ("CohereDecoderLayer",),
            "norm_feeds": (
                (
                    "input_layernorm",
                    (
                        "self_attn.q_proj",
                        "self_attn.k_proj",
                        "self_attn.v_proj",
                        "mlp.gate_proj",
                        "mlp.up_proj",
                    ),
                ),
            ),
        },
        naming_spec={"is_tied": True},
    )
)
