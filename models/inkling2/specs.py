"""Inkling 2 with its towers: stacked experts, gate and up interleaved on disk."""

from __future__ import annotations

from modelopt_lite.models.inkling2_text.specs import SKIP
from modelopt_lite.models.inkling2_text.specs import SPEC as INKLING2_TEXT
from modelopt_lite.models.registry import register
from modelopt_lite.models.specs import EPSpec
from modelopt_lite.models.variants import variant

# Classes, module names, norms and who reads them: measured on built models, transformers 5.24.0.
# Names on disk: files written by save_pretrained of the same release.
SPEC = register(
    variant(
        INKLING2_TEXT,
        "inkling2",
        ep_spec=EPSpec(plan_config_attr="text_config"),
        ptq_spec={"skip_modules": ("*vision_tower*", "*visual*", *SKIP)},
    )
)
