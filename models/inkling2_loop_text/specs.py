"""Inkling 2 Loop, text only: the layers of Inkling 2, run more than once."""

from __future__ import annotations

from modelopt_lite.models.inkling2_text.specs import SKIP as INKLING2_SKIP
from modelopt_lite.models.inkling2_text.specs import SPEC as INKLING2_TEXT
from modelopt_lite.models.registry import register
from modelopt_lite.models.variants import variant

SKIP = (*INKLING2_SKIP, "*middle_cycle_cross_pass_*queries*")

# Classes, module names, norms and who reads them: measured on built models, transformers 5.24.0.
# Names on disk: files written by save_pretrained of the same release.
SPEC = register(
    variant(
        INKLING2_TEXT,
        "inkling2_loop_text",
        min_transformers_version="5.24",
        moe_spec={"block_names": ("Inkling2LoopSparseMoeBlock",)},
        ptq_spec={
            "layer_names": ("Inkling2LoopFullDecoderLayer", "Inkling2LoopSlidingDecoderLayer"),
            "skip_modules": SKIP,
        },
    )
)
