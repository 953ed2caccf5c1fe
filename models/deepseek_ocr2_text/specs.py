"""DeepSeek-OCR 2, text only."""

from __future__ import annotations

from modelopt_lite.models.deepseek_ocr2.specs import SPEC as DEEPSEEK_OCR2
from modelopt_lite.models.registry import register
from modelopt_lite.models.specs import EPSpec
from modelopt_lite.models.variants import variant

# The text model alone: layers and classes are those of the root type. transformers has no class
# that predicts text from it, so that its files have no output head and, mostly, no prefix:
# planning needs the model.
SPEC = register(
    variant(
        DEEPSEEK_OCR2,
        "deepseek_ocr2_text",
        ep_spec=EPSpec(requires_transformers="5.13"),
        ptq_spec={"skip_modules": ()},
        naming_spec=None,
    )
)
