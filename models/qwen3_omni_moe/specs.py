"""Qwen3-Omni: a thinker and a talker, both with experts, behind vision and audio towers."""

from __future__ import annotations

from modelopt_lite.models.qwen3_omni_moe_thinker.specs import SPEC as QWEN3_OMNI_MOE_THINKER
from modelopt_lite.models.registry import register
from modelopt_lite.models.specs import EPSpec
from modelopt_lite.models.variants import variant

# The thinker's layers are those that text runs through. The talker, which has experts and a
# shared one, speaks: it is left as it is, with its code predictor and code2wav. Until 5.21
# transformers has a plan for the talker alone. Names lie below thinker: planning needs the model.
SPEC = register(
    variant(
        QWEN3_OMNI_MOE_THINKER,
        "qwen3_omni_moe",
        min_transformers_version="4.57",
        ep_spec=EPSpec(
            requires_transformers="5.21",
            plan_config_attr="thinker_config.text_config",
            unsupported=(
                "only the thinker is calibrated, and transformers would shard the talker too"
            ),
        ),
        ptq_spec={
            # The root class names no output head: the thinker's would be taken for a linear layer.
            "skip_modules": (
                *("*talker*", "*code2wav*", "*visual*", "*audio_tower*"),
                "*thinker.lm_head",
            )
        },
        naming_spec=None,
    )
)
