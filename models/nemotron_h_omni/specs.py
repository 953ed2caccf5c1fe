"""Nemotron-H Omni: Nemotron-H behind vision and audio towers."""

from __future__ import annotations

from modelopt_lite.models.nemotron_h.specs import SPEC as NEMOTRON_H
from modelopt_lite.models.registry import register
from modelopt_lite.models.specs import EPSpec
from modelopt_lite.models.variants import variant

# Classes, names and who reads the norms: measured on a built model, transformers 5.24.0; the text
# model is a nemotron_h, found by its own type.
SPEC = register(
    variant(
        NEMOTRON_H,
        "nemotron_h_omni",
        min_transformers_version="5.18",
        export_spec=None,
        ep_spec=EPSpec(requires_transformers="5.21", plan_config_attr="text_config"),
        ptq_spec={
            "skip_modules": (
                "*vision_model*",
                "*multi_modal_projector*",
                "mlp1.*",
                "*sound*",
                "*.conv1d",
                # The root class names no output head: that of its text model would be taken for a
                # linear layer.
                "*language_model.lm_head",
            )
        },
        naming_spec=None,
    )
)
