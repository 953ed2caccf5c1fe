"""Inkling 2 Loop with its towers."""

from __future__ import annotations

from modelopt_lite.models.inkling2_loop_text.specs import SPEC as INKLING2_LOOP_TEXT
from modelopt_lite.models.registry import register
from modelopt_lite.models.specs import EPSpec
from modelopt_lite.models.variants import variant

# Classes, module names, norms and who reads them: measured on built models, transformers 5.24.0.
# Names on disk: files written by save_pretrained of the same release.
SPEC = register(
    variant(
        INKLING2_LOOP_TEXT,
        "inkling2_loop",
        ep_spec=EPSpec(plan_config_attr="text_config"),
        ptq_spec={
            "skip_modules": (
                "*vision_tower*",
                "*attn_res*",
                "*middle_cycle_cross_pass_kv_queries*",
                "*middle_cycle_cross_pass_queries*",
                "*visual*",
                "*.k_sconv",
                "*.scale",
                "*.proj",
                "*.v_sconv",
                "*.attn_sconv",
                "*.mlp_sconv",
                "*.static_w",
            )
        },
    )
)
