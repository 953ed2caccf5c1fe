"""Qwen4 (experimental) with its vision tower."""

from __future__ import annotations

from modelopt_lite.models.qwen4_exp_text.specs import SPEC as QWEN4_EXP_TEXT
from modelopt_lite.models.registry import register
from modelopt_lite.models.specs import EPSpec
from modelopt_lite.models.variants import variant

# Classes, module names, norms and who reads them: measured on built models, transformers 5.24.0.
# Names on disk: files written by save_pretrained of the same release.
# No norm_feeds: attention and MLP read what the hyper-connections mixed, not a norm.
SPEC = register(
    variant(
        QWEN4_EXP_TEXT,
        "qwen4_exp",
        ep_spec=EPSpec(plan_config_attr="text_config"),
        ptq_spec={
            "skip_modules": (
                "*hyper_connection_mixer*",
                "*visual*",
                "*hyper_connection*",
                "*.conv1d",
            )
        },
        naming_spec={
            "layer_lists": ("model.language_model.layers",),
            "embedding_names": ("model.language_model.embed_tokens",),
        },
    )
)
