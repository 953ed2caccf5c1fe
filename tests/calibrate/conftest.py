"""Tiny models with seeded weights, as the tests of calibration need them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from modelopt_lite.build import quiet_transformers

COMMON: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
}
FIELDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "gemma3_text": {"sliding_window": 4, "query_pre_attn_scalar": 8},
    "qwen3_moe": {"num_experts": 4},
    "mixtral": {"num_local_experts": 4},
    "gpt_oss": {"num_local_experts": 4, "intermediate_size": 32, "sliding_window": 4},
    "deepseek_v3": {
        "num_key_value_heads": 4,
        "first_k_dense_replace": 1,
        "n_routed_experts": 4,
        "n_group": 2,
        "topk_group": 1,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 8,
    },
    "llama4_text": {
        "num_local_experts": 4,
        "num_experts_per_tok": 1,
        "interleave_moe_layer_step": 1,
    },
}

BuildModel = Callable[..., Any]


@pytest.fixture
def build_model() -> BuildModel:
    """Return a function (model_type, **loading options) -> seeded float32 model."""

    def make(model_type: str, **options: Any) -> Any:
        import transformers

        config = transformers.AutoConfig.for_model(model_type, **{**COMMON, **FIELDS[model_type]})
        torch.manual_seed(0)
        with quiet_transformers():
            model = transformers.AutoModelForCausalLM.from_config(config, **options)
        for parameter in model.parameters():
            if parameter.ndim > 1:
                torch.nn.init.normal_(parameter, 0, 0.2)
        return model.float().eval().requires_grad_(False)

    return make
