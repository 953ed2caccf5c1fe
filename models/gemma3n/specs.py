"""Gemma 3n with its vision and audio towers."""

from __future__ import annotations

from modelopt_lite.models.gemma3n_text.specs import SPEC as GEMMA3N_TEXT
from modelopt_lite.models.registry import register
from modelopt_lite.models.variants import variant

# Towers: read in modeling_gemma3n.py, transformers 5.14.1; the layers are those of the text type.
# No small model of the root type was built, so names on disk are left to the model.
SPEC = register(
    variant(
        GEMMA3N_TEXT,
        "gemma3n",
        ptq_spec={
            "skip_modules": (
                *("*vision_tower*", "*audio_tower*", "*embed_vision*", "*embed_audio*"),
                *("*altup*", "*per_layer_model_projection", "*embed_tokens_per_layer"),
            )
        },
        naming_spec=None,
    )
)
