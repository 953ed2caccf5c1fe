"""NeMo SpeechLM: Nemotron-H behind speech encoders."""

from __future__ import annotations

from modelopt_lite.models.nemotron_h.specs import SPEC as NEMOTRON_H
from modelopt_lite.models.registry import register
from modelopt_lite.models.specs import EPSpec
from modelopt_lite.models.variants import variant

# Blocks and layers: a built model, transformers 5.24.0. Its towers were not told apart from names
# on disk: planning needs the model.
SPEC = register(
    variant(
        NEMOTRON_H,
        "nemo_speechlm",
        min_transformers_version="5.22",
        export_spec=None,
        ep_spec=EPSpec(plan_config_attr="text_config"),
        ptq_spec={
            # As modules are called in memory, then on disk.
            "skip_modules": (
                *("*audio_tower*", "*word_timestamp_encoder*"),
                *("*perception*", "*ctc_timestamp*"),
                "*.conv1d",
            )
        },
        naming_spec=None,
    )
)
