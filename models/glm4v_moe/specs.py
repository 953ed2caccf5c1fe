"""GLM-4.5V and 4.6V: the layers of GLM-4.5 behind a vision tower."""

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
        "glm4v_moe",
        moe_spec={"block_names": ("Glm4vMoeTextMoE",)},
        ep_spec={"plan_config_attr": "text_config"},
        ptq_spec={"layer_names": ("Glm4vMoeTextDecoderLayer",), "skip_modules": ("*visual*",)},
        naming_spec={
            "layer_lists": ("model.language_model.layers",),
            "embedding_names": ("model.language_model.embed_tokens",),
        },
    )
)
