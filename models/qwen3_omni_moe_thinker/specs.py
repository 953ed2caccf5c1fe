"""Qwen3-Omni's thinker: text with experts behind vision and audio towers."""

from __future__ import annotations

from modelopt_lite.models.qwen3_moe.specs import SPEC as QWEN3_MOE
from modelopt_lite.models.registry import register
from modelopt_lite.models.variants import variant

# Classes, module names, norms and who reads them: measured on built models, transformers 5.14.1 and
# 5.24.0. Names on disk: files written by save_pretrained of the same releases.
# Expert parallelism: first release whose config class carries a plan (5.21.0).
SPEC = register(
    variant(
        QWEN3_MOE,
        "qwen3_omni_moe_thinker",
        min_transformers_version="5.6",
        moe_spec={"block_names": ("Qwen3OmniMoeThinkerTextSparseMoeBlock",)},
        export_spec=None,
        ep_spec={"requires_transformers": "5.21", "plan_config_attr": "text_config"},
        ptq_spec={
            "layer_names": ("Qwen3OmniMoeThinkerTextDecoderLayer",),
            "skip_modules": ("*audio_tower*", "*visual*"),
        },
    )
)
