"""Qwen3.5 (dense) with its vision tower."""

from __future__ import annotations

from modelopt_lite.models.qwen3_5_text.specs import SPEC as QWEN3_5_TEXT
from modelopt_lite.models.registry import register
from modelopt_lite.models.variants import variant

# Classes, module names, norms and who reads them: measured on built models, transformers 5.14.1 and
# 5.24.0. Names on disk: files written by save_pretrained of the same releases.
SPEC = register(
    variant(
        QWEN3_5_TEXT,
        "qwen3_5",
        ptq_spec={"skip_modules": ("*visual*", "*.conv1d")},
        naming_spec={
            "layer_lists": ("model.language_model.layers",),
            "embedding_names": ("model.language_model.embed_tokens",),
        },
    )
)
