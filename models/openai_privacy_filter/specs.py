"""OpenAI privacy filter: gpt-oss that labels tokens, gate and up one after the other."""

from __future__ import annotations

from modelopt_lite.models.gpt_oss.specs import SPEC as GPT_OSS
from modelopt_lite.models.registry import register
from modelopt_lite.models.variants import variant

# It predicts labels, no tokens, so it cannot be calibrated as a language model. Classes and
# layout: built models, transformers 5.6.2 to 5.24.0. What readers of norms there are was not
# measured: no norm_feeds.
SPEC = register(
    variant(
        GPT_OSS,
        "openai_privacy_filter",
        min_transformers_version="5.6",
        moe_spec={"block_names": ("OpenAIPrivacyFilterMLP",)},
        ptq_spec={
            "layer_names": ("OpenAIPrivacyFilterEncoderLayer",),
            "skip_modules": ("*score",),
            "norm_feeds": (),
        },
        expert_storage_spec={"interleaved_gate_up": False},
        naming_spec=None,
    )
)
