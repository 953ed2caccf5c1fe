"""Unlimited-OCR: vision encoders before a text model with routed and shared experts."""

from __future__ import annotations

from modelopt_lite.models.glm4_moe.specs import SPEC as GLM4_MOE
from modelopt_lite.models.registry import register
from modelopt_lite.models.variants import variant

# Classes, module names, norms and who reads them: measured on built models, transformers 5.24.0.
# Names on disk: files written by save_pretrained of the same release.
SPEC = register(
    variant(
        GLM4_MOE,
        "unlimited_ocr",
        min_transformers_version="5.20",
        moe_spec={"block_names": ("UnlimitedOcrTextMoe",)},
        ep_spec={"requires_transformers": None, "plan_config_attr": "text_config"},
        ptq_spec={
            "layer_names": ("UnlimitedOcrTextDecoderLayer",),
            "skip_modules": (
                "*multi_modal_projector*",
                "*vision_tower*",
                "*projector*",
                "*sam_model*",
                "*vision_model*",
            ),
            "keep_dtype_names": (),
        },
    )
)
