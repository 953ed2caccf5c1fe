"""Llama 4 with its vision tower: experts stacked input-major, a shared expert beside them."""

from __future__ import annotations

from modelopt_lite.models.llama4_text.specs import SPEC as LLAMA4_TEXT
from modelopt_lite.models.registry import register
from modelopt_lite.models.variants import variant

# Classes, module names, norms and who reads them: measured on built models, transformers 5.14.1 and
# 5.24.0. Names on disk: files written by save_pretrained of the same releases.
# Experts read the norm's output times the router's score: a scale of a channel passes through.
# llama4's experts stay stacked: vLLM (llama4.py) reads gate_up_proj and down_proj.
SPEC = register(
    variant(
        LLAMA4_TEXT,
        "llama4",
        ep_spec={"plan_config_attr": "text_config"},
        ptq_spec={"skip_modules": ("*multi_modal_projector*", "*vision_model*")},
        naming_spec={
            "layer_lists": ("language_model.model.layers",),
            "embedding_names": ("language_model.model.embed_tokens",),
            "head_names": ("language_model.lm_head",),
        },
    )
)
