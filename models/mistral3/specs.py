"""Mistral 3: Mistral behind a Pixtral tower and a projector."""

from __future__ import annotations

from modelopt_lite.models.mistral.specs import SPEC as MISTRAL
from modelopt_lite.models.registry import register
from modelopt_lite.models.variants import variant

# Classes, module names, norms and who reads them: measured on built models, transformers 5.14.1 and
# 5.24.0. Names on disk: files written by save_pretrained of the same releases.
SPEC = register(
    variant(
        MISTRAL,
        "mistral3",
        ptq_spec={"skip_modules": ("*multi_modal_projector*", "*vision_tower*")},
        naming_spec={
            "layer_lists": ("language_model.model.layers",),
            "embedding_names": ("language_model.model.embed_tokens",),
            # Up to 4.57 the head, too, has the prefix on disk.
            "head_names": ("lm_head", "language_model.lm_head"),
        },
    )
)
