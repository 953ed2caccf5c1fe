"""DeepSeek-OCR 2: SAM and Qwen2 as vision encoders before a text model with experts."""

from __future__ import annotations

from modelopt_lite.models.glm4_moe.specs import SPEC as GLM4_MOE
from modelopt_lite.models.registry import register
from modelopt_lite.models.variants import variant

# Classes, module names, norms and who reads them: measured on built models, transformers 5.14.1 and
# 5.24.0. Names on disk: files written by save_pretrained of the same releases.
# Expert parallelism: first release whose config class carries a plan (5.13.0).
SPEC = register(
    variant(
        GLM4_MOE,
        "deepseek_ocr2",
        min_transformers_version="5.10",
        moe_spec={"block_names": ("DeepseekOcr2TextMoe",)},
        ep_spec={"plan_config_attr": "text_config"},
        ptq_spec={
            "layer_names": ("DeepseekOcr2TextDecoderLayer",),
            "skip_modules": (
                "*multi_modal_projector*",
                "*vision_tower*",
                "*projector*",
                "*qwen2_model*",
                "*sam_model*",
            ),
            "keep_dtype_names": (),
        },
    )
)
