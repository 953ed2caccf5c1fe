"""HY4-VL: the layers of HY4 behind a vision tower."""

from __future__ import annotations

from modelopt_lite.models.hy_v4.specs import SPEC as HY_V4
from modelopt_lite.models.registry import register
from modelopt_lite.models.specs import EPSpec
from modelopt_lite.models.variants import variant

# Classes, module names, norms and who reads them: measured on built models, transformers 5.24.0.
# Names on disk: files written by save_pretrained of the same release.
SPEC = register(
    variant(
        HY_V4,
        "hy_v4_vl",
        min_transformers_version="5.24",
        moe_spec={"block_names": ("HYV4VLMoE",)},
        ep_spec=EPSpec(plan_config_attr="text_config"),
        ptq_spec={
            "layer_names": ("HYV4VLDecoderLayer",),
            "skip_modules": (
                "*vision_tower*",
                "*hc_head*",
                "*vit*",
                "*.indexer.wk",
                "*.indexer.weights_proj",
                "*.hc_fn",
            ),
        },
    )
)
