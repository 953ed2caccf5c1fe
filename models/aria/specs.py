"""Aria with its vision tower: Aria's text layers behind an Idefics tower and a projector."""

from __future__ import annotations

from modelopt_lite.models.aria_text.specs import SPEC as ARIA_TEXT
from modelopt_lite.models.registry import register
from modelopt_lite.models.variants import variant

# Classes, module names, norms and who reads them: measured on built models, transformers 5.14.1 and
# 5.24.0. Names on disk: files written by save_pretrained of the same releases.
# Expert parallelism: first release whose config class carries a plan (5.21.0).
SPEC = register(
    variant(
        ARIA_TEXT,
        "aria",
        ep_spec={"plan_config_attr": "text_config"},
        ptq_spec={"skip_modules": ("*multi_modal_projector*", "*vision_tower*")},
        naming_spec={
            "layer_lists": ("language_model.model.layers", "model.language_model.layers"),
            "embedding_names": (
                "language_model.model.embed_tokens",
                "model.language_model.embed_tokens",
            ),
            "head_names": ("lm_head", "language_model.lm_head"),
        },
    )
)
