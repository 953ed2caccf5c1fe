"""A small composite checkpoint whose text model has experts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

TEXT: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "mrope_section": [1, 1, 2],
        "partial_rotary_factor": 1.0,
    },
}


def make_composite(folder: Path, **changes: Any) -> Path:
    """Write a vision-language checkpoint of GLM-4V with experts; changes are of its text model."""
    import transformers

    if not hasattr(transformers, "Glm4vMoeForConditionalGeneration"):
        pytest.skip("no composite with experts")
    text = {**TEXT, **changes}
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 4}
    vision |= {"out_hidden_size": text["hidden_size"], "patch_size": 4, "image_size": 16}
    tokens = {f"{kind}_token_id": 60 + at for at, kind in enumerate(("image", "video"))}
    config = transformers.AutoConfig.for_model(
        "glm4v_moe", text_config=text, vision_config=vision, **tokens
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForImageTextToText.from_config(config).to(torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape) * 0.05 + (parameter.ndim == 1))
    model.save_pretrained(folder)
    return folder
