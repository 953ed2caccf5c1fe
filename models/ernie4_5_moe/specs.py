"""ERNIE 4.5 MoE: GQA, dense first layers, then routed and shared experts."""

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
        "ernie4_5_moe",
        moe_spec={"block_names": ("Ernie4_5_MoeSparseMoeBlock",)},
        ptq_spec={
            "layer_names": ("Ernie4_5_MoeDecoderLayer",),
            "skip_modules": ("*.e_score_correction_bias",),
        },
        naming_spec={"is_tied": True},
    )
)
