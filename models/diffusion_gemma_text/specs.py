"""Diffusion Gemma, text layers only."""

from __future__ import annotations

from modelopt_lite.models.diffusion_gemma.specs import SPEC as DIFFUSION_GEMMA
from modelopt_lite.models.registry import register
from modelopt_lite.models.variants import variant

# The text model alone: layers and classes are those of the root type. transformers has no class
# that predicts text from it, so that its files have no output head and, mostly, no prefix:
# planning needs the model.
SPEC = register(
    variant(
        DIFFUSION_GEMMA,
        "diffusion_gemma_text",
        ep_spec=None,
        # Built alone it is the encoder.
        ptq_spec={"layer_names": ("DiffusionGemmaEncoderTextLayer",), "skip_modules": ()},
        naming_spec=None,
    )
)
