"""Gemma 4 with its towers: Gemma 4 text layers behind vision and audio encoders."""

from __future__ import annotations

from modelopt_lite.models.gemma4_text.specs import SPEC as GEMMA4_TEXT
from modelopt_lite.models.registry import register
from modelopt_lite.models.specs import EPSpec
from modelopt_lite.models.variants import variant

# Classes, module names, norms and who reads them: measured on built models, transformers 5.14.1 and
# 5.24.0. Names on disk: files written by save_pretrained of the same releases.
# The experts have no block of their own: router and experts are children of the layer, beside a
# dense MLP, and only where the config sets enable_moe_block.
SPEC = register(
    variant(
        GEMMA4_TEXT,
        "gemma4",
        ep_spec=EPSpec(plan_config_attr="text_config"),
        ptq_spec={
            "skip_modules": (
                "*per_layer_model_projection*",
                "*embed_tokens_per_layer*",
                "*per_layer_model_projection",
                "*embed_tokens_per_layer",
            )
        },
        naming_spec={
            "layer_lists": ("model.language_model.layers",),
            "embedding_names": ("model.language_model.embed_tokens",),
        },
    )
)
