"""Hunyuan V1 (dense): norms on q and k."""

from __future__ import annotations

from modelopt_lite.models.llama.specs import SPEC as LLAMA
from modelopt_lite.models.registry import register
from modelopt_lite.models.variants import variant

# Classes, module names, norms and who reads them: measured on built models, transformers 5.14.1 and
# 5.24.0. Names on disk: files written by save_pretrained of the same releases.
SPEC = register(
    variant(
        LLAMA,
        "hunyuan_v1_dense",
        export_spec=None,
        ptq_spec={"layer_names": ("HunYuanDenseV1DecoderLayer",)},
    )
)
