"""Qwen3-VL-MoE: the layers of Qwen3-MoE, experts stacked on disk, behind a vision tower."""

from __future__ import annotations

from modelopt_lite.models.qwen3_moe.specs import SPEC as QWEN3_MOE
from modelopt_lite.models.registry import register
from modelopt_lite.models.variants import variant

# Classes, module names, norms and who reads them: measured on built models, transformers 5.14.1 and
# 5.24.0. Names on disk: files written by save_pretrained of the same releases.
# Expert parallelism: first release whose config class carries a plan (5.7.0). Up to 4.57 stacks are
# [E, H, 2I] and [E, I, H], in memory and in the files it wrote; since 5.0 they are [E, 2I, H] and
# [E, H, I] in memory, and files of either kind are loaded.
SPEC = register(
    variant(
        QWEN3_MOE,
        "qwen3_vl_moe",
        moe_spec={"block_names": ("Qwen3VLMoeTextSparseMoeBlock",)},
        export_spec=None,
        ep_spec={"plan_config_attr": "text_config"},
        ptq_spec={"layer_names": ("Qwen3VLMoeTextDecoderLayer",), "skip_modules": ("*visual*",)},
        expert_storage_spec={"either_major": True},
        naming_spec={
            "layer_lists": ("model.language_model.layers",),
            "embedding_names": ("model.language_model.embed_tokens",),
            "is_tied": True,
        },
    )
)
