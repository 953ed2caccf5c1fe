"""Kimi K2.5: the layers of DeepSeek-V3 behind a vision tower."""

from __future__ import annotations

from modelopt_lite.models.deepseek_v3.specs import SPEC as DEEPSEEK_V3
from modelopt_lite.models.registry import register
from modelopt_lite.models.variants import variant

# Classes, module names, norms and who reads them: measured on built models, transformers 5.14.1 and
# 5.24.0. Names on disk: files written by save_pretrained of the same releases.
SPEC = register(
    variant(
        DEEPSEEK_V3,
        "kimi_k25",
        min_transformers_version="5.13",
        ep_spec={"requires_transformers": None, "plan_config_attr": "text_config"},
        ptq_spec={"skip_modules": ("*mm_projector*", "*vision_tower*")},
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
            ),
            "layer_lists": ("language_model.model.layers", "language_model.model.blocks"),
            "embedding_names": ("language_model.model.embed_tokens",),
        },
    )
)
