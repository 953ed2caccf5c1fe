"""Inkling 2 Loop with its towers."""

from __future__ import annotations

from modelopt_lite.models.inkling2_loop_text.specs import SKIP
from modelopt_lite.models.inkling2_loop_text.specs import SPEC as INKLING2_LOOP_TEXT
from modelopt_lite.models.registry import register
from modelopt_lite.models.specs import EPSpec
from modelopt_lite.models.variants import variant

# Classes, module names, norms and who reads them: measured on built models, transformers 5.24.0.
# Names on disk: files written by save_pretrained of the same release.
SPEC = register(
    variant(
        INKLING2_LOOP_TEXT,
        "inkling2_loop",
        ep_spec=EPSpec(plan_config_attr="text_config"),
        ptq_spec={"skip_modules": ("*vision_tower*", "*visual*", *SKIP)},
    )
)
