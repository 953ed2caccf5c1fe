"""Gemma 4 unified."""

from __future__ import annotations

from modelopt_lite.models.gemma2.specs import SPEC as GEMMA2
from modelopt_lite.models.registry import register
from modelopt_lite.models.variants import variant

# Classes, module names, norms and who reads them: measured on built models, transformers 5.14.1 and
# 5.24.0. Names on disk: files written by save_pretrained of the same releases.
SPEC = register(
    variant(
        GEMMA2,
        "gemma4_unified",
        min_transformers_version="5.10",
        export_spec=None,
        ptq_spec={"layer_names": ("Gemma4UnifiedTextDecoderLayer",)},
        naming_spec={
            "layer_lists": ("model.language_model.layers",),
            "embedding_names": ("model.language_model.embed_tokens",),
        },
    )
)
