"""GLM-4.1V: GLM-4 behind a vision tower."""

from __future__ import annotations

from modelopt_lite.models.glm4.specs import SPEC as GLM4
from modelopt_lite.models.registry import register
from modelopt_lite.models.variants import variant

# Classes, module names, norms and who reads them: measured on built models, transformers 5.14.1 and
# 5.24.0. Names on disk: files written by save_pretrained of the same releases.
SPEC = register(
    variant(
        GLM4,
        "glm4v",
        ptq_spec={"layer_names": ("Glm4vTextDecoderLayer",), "skip_modules": ("*visual*",)},
        naming_spec={
            "layer_lists": ("model.language_model.layers",),
            "embedding_names": ("model.language_model.embed_tokens",),
        },
    )
)
