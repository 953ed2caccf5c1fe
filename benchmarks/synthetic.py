"""Checkpoints of any size, written without ever holding one in memory.

Weights are seeded, or holes in sparse files, which read as zeros and take no space on the disk.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from modelopt_lite.checkpoint.reader import INDEX_FILE
from modelopt_lite.checkpoint.shards import TensorPlan, plan_layout
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


# The published config, without what only training reads.
DEEPSEEK_V3: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "attention_bias": False,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    },
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "v_head_dim": 128,
    "vocab_size": 129280,
}

# The same architecture; published under a model_type of its own with code that only renames it.
KIMI_K2: dict[str, Any] = {
    **DEEPSEEK_V3,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 131072,
    "n_group": 1,
    "n_routed_experts": 384,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "num_nextn_predict_layers": 0,
    "rope_theta": 50000,
    "routed_scaling_factor": 2.827,
    "topk_group": 1,
    "vocab_size": 163840,
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


def make_sparse_deepseek(folder: Path, base: dict[str, Any], **changes: Any) -> Path:
    """Write headers in block FP8 as published, and holes in place of the weights."""
    config = {**base, **changes}
    layout = plan_layout(_deepseek_tensors(config), 4_300_000_000)
    folder.mkdir(parents=True)
    for file in layout.files:
        with (folder / file.name).open("wb") as out:
            out.write(file.header())
            os.truncate(out.fileno(), file.size)
    if layout.index:
        (folder / INDEX_FILE).write_bytes(layout.index)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    return folder


def _deepseek_tensors(config: dict[str, Any]) -> Iterator[TensorPlan]:
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    layers = config["num_hidden_layers"]
    yield "model.embed_tokens.weight", torch.bfloat16, (vocab, hidden)
    for layer in range(layers + config["num_nextn_predict_layers"]):
        prefix = f"model.layers.{layer}"
        yield from _deepseek_layer(prefix, config, is_dense=layer < config["first_k_dense_replace"])
        if layer >= layers:  # the extra prediction layer
            for name in ("enorm", "hnorm", "shared_head.norm"):
                yield f"{prefix}.{name}.weight", torch.bfloat16, (hidden,)
            yield f"{prefix}.eh_proj.weight", torch.bfloat16, (hidden, 2 * hidden)
            for name in ("embed_tokens", "shared_head.head"):
                yield f"{prefix}.{name}.weight", torch.bfloat16, (vocab, hidden)
    yield "model.norm.weight", torch.bfloat16, (hidden,)
    yield "lm_head.weight", torch.bfloat16, (vocab, hidden)


def _deepseek_layer(prefix: str, config: dict[str, Any], *, is_dense: bool) -> Iterator[TensorPlan]:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    q_rank, kv_rank = config["q_lora_rank"], config["kv_lora_rank"]
    nope, rope, value = (config[f"{n}_head_dim"] for n in ("qk_nope", "qk_rope", "v"))
    norms = {
        "input_layernorm": hidden,
        "post_attention_layernorm": hidden,
        "self_attn.q_a_layernorm": q_rank,
        "self_attn.kv_a_layernorm": kv_rank,
    }
    for name, width in norms.items():
        yield f"{prefix}.{name}.weight", torch.bfloat16, (width,)
    attention = {
        "q_a_proj": (q_rank, hidden),
        "q_b_proj": (heads * (nope + rope), q_rank),
        "kv_a_proj_with_mqa": (kv_rank + rope, hidden),
        "kv_b_proj": (heads * (nope + value), kv_rank),
        "o_proj": (hidden, heads * value),
    }
    for name, size in attention.items():
        yield from _block_fp8(f"{prefix}.self_attn.{name}.weight", size, config)
    parts = {"mlp": config["intermediate_size"]}
    if not is_dense:
        experts, width = config["n_routed_experts"], config["moe_intermediate_size"]
        yield f"{prefix}.mlp.gate.weight", torch.bfloat16, (experts, hidden)
        yield f"{prefix}.mlp.gate.e_score_correction_bias", torch.float32, (experts,)
        parts = {f"mlp.experts.{expert}": width for expert in range(experts)}
        parts["mlp.shared_experts"] = width * config["n_shared_experts"]
    for part, width in parts.items():
        for name, shape in _mlp(f"{prefix}.{part}", hidden, width).items():
            yield from _block_fp8(name, shape, config)


def _block_fp8(name: str, shape: Sequence[int], config: dict[str, Any]) -> Iterator[TensorPlan]:
    rows, columns = config["quantization_config"]["weight_block_size"]
    grid = (-(-shape[0] // rows), -(-shape[1] // columns))
    yield name, torch.float8_e4m3fn, (shape[0], shape[1])
    yield f"{name}_scale_inv", torch.float32, grid
