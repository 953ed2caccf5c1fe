"""Checkpoints of any size with seeded weights, written without ever holding one in memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from modelopt_lite.checkpoint.shards import plan_layout
from modelopt_lite.checkpoint.writer import StreamingWriter

QWEN3_MOE: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "dtype": "bfloat16",
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 512,
    "intermediate_size": 1024,
    "max_position_embeddings": 4096,
    "mlp_only_layers": [],
    "moe_intermediate_size": 384,
    "norm_topk_prob": True,
    "num_attention_heads": 8,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 8,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": False,
    "vocab_size": 4096,
}

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "attention_bias": False,
    "dtype": "bfloat16",
    "hidden_act": "silu",
    "hidden_size": 1536,
    "intermediate_size": 4096,
    "max_position_embeddings": 4096,
    "mlp_bias": False,
    "num_attention_heads": 12,
    "num_hidden_layers": 8,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": False,
    "vocab_size": 4096,
}


def make_checkpoint(folder: Path, base: dict[str, Any], **changes: Any) -> Path:
    """Write a checkpoint of random weights; ``changes`` replace keys of the config."""
    config = {**base, **changes}
    shapes = _shapes(config)
    plan = [(name, torch.bfloat16, shape) for name, shape in shapes.items()]
    generator = torch.Generator().manual_seed(0)
    with StreamingWriter(folder, plan_layout(plan, 2_000_000_000)) as writer:
        for name, shape in shapes.items():
            if len(shape) == 1:
                value = torch.ones(shape)
            else:
                value = torch.randn(shape, generator=generator) * shape[-1] ** -0.5
            writer.write(name, value.to(torch.bfloat16))
        writer.finish()
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    return folder


def _shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head = config.get("head_dim") or hidden // heads
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden)}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        shapes[f"{prefix}.input_layernorm.weight"] = (hidden,)
        for name, count in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
            shapes[f"{prefix}.self_attn.{name}_proj.weight"] = (count * head, hidden)
        shapes[f"{prefix}.self_attn.o_proj.weight"] = (hidden, heads * head)
        shapes[f"{prefix}.post_attention_layernorm.weight"] = (hidden,)
        if "num_experts" in config:
            for name in ("q_norm", "k_norm"):
                shapes[f"{prefix}.self_attn.{name}.weight"] = (head,)
            shapes[f"{prefix}.mlp.gate.weight"] = (config["num_experts"], hidden)
            for expert in range(config["num_experts"]):
                width = config["moe_intermediate_size"]
                shapes |= _mlp(f"{prefix}.mlp.experts.{expert}", hidden, width)
        else:
            shapes |= _mlp(f"{prefix}.mlp", hidden, config["intermediate_size"])
    shapes["model.norm.weight"] = (hidden,)
    shapes["lm_head.weight"] = (vocab, hidden)
    return shapes


def _mlp(prefix: str, hidden: int, width: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{prefix}.gate_proj.weight": (width, hidden),
        f"{prefix}.up_proj.weight": (width, hidden),
        f"{prefix}.down_proj.weight": (hidden, width),
    }
