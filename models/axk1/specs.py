"""A.X K1: latent attention (MLA), dense first layers, then routed and shared experts."""

from __future__ import annotations

from modelopt_lite.models.deepseek_v3.specs import SPEC as DEEPSEEK_V3
from modelopt_lite.models.registry import register
from modelopt_lite.models.variants import variant

# Classes, module names, norms and who reads them: measured on built models, transformers 5.24.0.
# Names on disk: files written by save_pretrained of the same release.
SPEC = register(
    variant(
        DEEPSEEK_V3,
        "axk1",
        min_transformers_version="5.15",
        moe_spec={"block_names": ("AXK1MoE",)},
        ep_spec=None,
        ptq_spec={"layer_names": ("AXK1DecoderLayer",)},
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
