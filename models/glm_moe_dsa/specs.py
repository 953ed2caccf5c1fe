"""GLM-5: latent attention with an indexer, dense first layers, then routed and shared experts."""

from __future__ import annotations

from modelopt_lite.models.deepseek_v32.specs import SPEC as DEEPSEEK_V32
from modelopt_lite.models.registry import register
from modelopt_lite.models.variants import variant

# Classes, module names, norms and who reads them: measured on built models, transformers 5.14.1 and
# 5.24.0. Names on disk: files written by save_pretrained of the same releases.
# Expert parallelism: first release whose config class carries a plan (5.13.0).
SPEC = register(
    variant(
        DEEPSEEK_V32,
        "glm_moe_dsa",
        min_transformers_version="5.2",
        moe_spec={"block_names": ("GlmMoeDsaMoE",)},
        ptq_spec={"layer_names": ("GlmMoeDsaDecoderLayer",)},
    )
)
