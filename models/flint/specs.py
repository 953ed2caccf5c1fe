"""Flint: routed experts and a shared one."""

from __future__ import annotations

from modelopt_lite.models.qwen2_moe.specs import SPEC as QWEN2_MOE
from modelopt_lite.models.registry import register
from modelopt_lite.models.variants import variant

# Classes, module names, norms and who reads them: measured on built models, transformers 5.24.0.
# Names on disk: files written by save_pretrained of the same release.
SPEC = register(
    variant(
        QWEN2_MOE,
        "flint",
        min_transformers_version="5.21",
        moe_spec={"block_names": ("FlintSparseMoeBlock",)},
        export_spec=None,
        ep_spec=None,
        ptq_spec={
            "layer_names": ("FlintDecoderLayer",),
            "router_names": ("gate",),
            "keep_dtype_names": ("sinks",),
        },
    )
)
