"""GLM-5-Next with its vision tower."""

from __future__ import annotations

from modelopt_lite.models.glm5_next_text.specs import SPEC as GLM5_NEXT_TEXT
from modelopt_lite.models.registry import register
from modelopt_lite.models.specs import EPSpec
from modelopt_lite.models.variants import variant

# Classes, module names, norms and who reads them: measured on built models, transformers 5.24.0.
# Names on disk: files written by save_pretrained of the same release.
SPEC = register(
    variant(
        GLM5_NEXT_TEXT,
        "glm5_next",
        ep_spec=EPSpec(plan_config_attr="text_config"),
        ptq_spec={
            "skip_modules": (
                "*visual*",
                "*.indexer.wk",
                "*.indexer.weights_proj",
                "*.hc_*",
                "*_conv1d",
                "*.index_kpool_compress_*",
            )
        },
        naming_spec={
            "layer_lists": ("model.language_model.layers",),
            "embedding_names": ("model.language_model.embed_tokens",),
            "head_names": ("lm_head",),
        },
    )
)
