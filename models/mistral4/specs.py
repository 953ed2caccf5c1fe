"""Mistral 4, text only: latent attention (MLA), stacked experts on disk, routed and shared."""

from __future__ import annotations

from modelopt_lite.models.deepseek_v3.specs import SPEC as DEEPSEEK_V3
from modelopt_lite.models.registry import register
from modelopt_lite.models.variants import variant

# Classes, module names, norms and who reads them: measured on built models, transformers 5.14.1 and
# 5.24.0. Names on disk: files written by save_pretrained of the same releases.
# Expert parallelism: first release whose config class carries a plan (5.13.0).
SPEC = register(
    variant(
        DEEPSEEK_V3,
        "mistral4",
        min_transformers_version="5.4",
        moe_spec={"block_names": ("Mistral4MoE",)},
        ptq_spec={"layer_names": ("Mistral4DecoderLayer",), "keep_dtype_names": ()},
        naming_spec={
            "layer_linear_names": (
                "q_a_proj",
                "q_b_proj",
                "kv_a_proj_with_mqa",
                "kv_b_proj",
                "o_proj",
                "gate_proj",
                "up_proj",
                "down_proj",
            )
        },
    )
)
