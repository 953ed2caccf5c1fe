"""Mistral Large 4, text only."""

from __future__ import annotations

from modelopt_lite.models.mistral_large4.specs import SPEC as MISTRAL_LARGE4
from modelopt_lite.models.registry import register
from modelopt_lite.models.variants import variant

# The text model alone: layers and classes are those of the root type. transformers has no class
# that predicts text from it, so that its files have no output head and, mostly, no prefix:
# planning needs the model.
SPEC = register(
    variant(
        MISTRAL_LARGE4,
        "mistral_large4_text",
        ep_spec=None,
        ptq_spec={"skip_modules": ()},
        naming_spec=None,
    )
)
