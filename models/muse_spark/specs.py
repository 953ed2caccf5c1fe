"""Muse Spark with its vision and audio towers."""

from __future__ import annotations

from modelopt_lite.models.muse_spark_text.specs import SPEC as MUSE_SPARK_TEXT
from modelopt_lite.models.registry import register
from modelopt_lite.models.specs import EPSpec
from modelopt_lite.models.variants import variant

# Blocks and layers: a built model, transformers 5.24.0. No small model of the root type was built
# here; the layers are those of the text type.
SPEC = register(
    variant(
        MUSE_SPARK_TEXT,
        "muse_spark",
        ep_spec=EPSpec(plan_config_attr="text_config"),
        ptq_spec={
            "skip_modules": (
                "*vision_tower*",
                "*audio_tower*",
                "*vision_adapter*",
                "*vision_projection*",
            )
        },
    )
)
