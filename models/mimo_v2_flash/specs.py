"""MiMo-V2-Flash: full and sliding attention of two widths, a dense layer, then experts."""

from __future__ import annotations

from modelopt_lite.models.glm4_moe.specs import SPEC as GLM4_MOE
from modelopt_lite.models.registry import register
from modelopt_lite.models.variants import variant

# Classes, module names, norms and who reads them: measured on built models, transformers 5.14.1 and
# 5.24.0. Names on disk: files written by save_pretrained of the same releases.
SPEC = register(
    variant(
        GLM4_MOE,
        "mimo_v2_flash",
        min_transformers_version="5.13",
        moe_spec={"block_names": ("MiMoV2FlashMoE",)},
        ep_spec=None,
        ptq_spec={"layer_names": ("MiMoV2FlashDecoderLayer",)},
        expert_storage_spec={"shared_expert_names": ()},
    )
)
