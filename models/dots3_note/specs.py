"""dots3 note with its vision and audio towers."""

from __future__ import annotations

from modelopt_lite.models.dots3_note_text.specs import SPEC as DOTS3_NOTE_TEXT
from modelopt_lite.models.registry import register
from modelopt_lite.models.specs import EPSpec
from modelopt_lite.models.variants import variant

# Blocks and layers: a built model, transformers 5.24.0. The vision tower has experts as well; it
# stays as it is. No small model of the root type was built here, so names on disk are left to the
# model.
SPEC = register(
    variant(
        DOTS3_NOTE_TEXT,
        "dots3_note",
        ep_spec=EPSpec(plan_config_attr="text_config"),
        ptq_spec={
            "skip_modules": (
                "*vision_tower*",
                "*audio_tower*",
                "*vision_encoder*",
                "*audio_encoder*",
                "*.indexer.wk",
                "*.indexer.weights_proj",
            )
        },
        naming_spec=None,
    )
)
