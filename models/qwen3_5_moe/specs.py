"""Qwen3.5-MoE with its vision tower: delta nets and gated attention, experts."""

from __future__ import annotations

from modelopt_lite.models.qwen3_5_moe_text.specs import SPEC as QWEN3_5_MOE_TEXT
from modelopt_lite.models.registry import register
from modelopt_lite.models.variants import variant

# Classes, module names, norms and who reads them: measured on built models, transformers 5.14.1 and
# 5.24.0. Names on disk: files written by save_pretrained of the same releases.
# Expert parallelism: first release whose config class carries a plan (5.13.0).
SPEC = register(
    variant(
        QWEN3_5_MOE_TEXT,
        "qwen3_5_moe",
        ep_spec={"plan_config_attr": "text_config"},
        ptq_spec={"skip_modules": ("*visual*", "*.conv1d")},
        naming_spec={
            "layer_lists": ("model.language_model.layers",),
            "embedding_names": ("model.language_model.embed_tokens",),
        },
    )
)
