"""Gemma: norms that scale by weight + 1."""

from __future__ import annotations

from modelopt_lite.models.llama.specs import SPEC as LLAMA
from modelopt_lite.models.registry import register
from modelopt_lite.models.variants import variant

# Classes, module names, norms and who reads them: measured on built models, transformers 5.14.1 and
# 5.24.0. Names on disk: files written by save_pretrained of the same releases.
SPEC = register(
    variant(
        LLAMA,
        "gemma",
        export_spec={"pqs_fuse_rules": (), "weight_plus_one_norm_names": ("GemmaRMSNorm",)},
        ptq_spec={"layer_names": ("GemmaDecoderLayer",)},
        naming_spec={"is_tied": True},
    )
)
