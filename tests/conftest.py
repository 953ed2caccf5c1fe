"""Tiny checkpoints from configs with seeded weights, written once a session."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import modelopt_lite
from modelopt_lite.build import quiet_transformers

COMMON: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
PACKAGED = Path(modelopt_lite.__file__).parent / "data" / "tiny_qwen3_moe"
MOE: dict[str, Any] = {**COMMON, "head_dim": 8, "moe_intermediate_size": 32}

# Name of a fixture -> (config class, its arguments).
TINY: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", COMMON),
    "llama_tied": ("LlamaConfig", {**COMMON, "tie_word_embeddings": True}),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {**MOE, "num_experts": 8, "num_experts_per_tok": 1, "decoder_sparse_step": 1},
    ),
    "mixtral": ("MixtralConfig", {**COMMON, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "deepseek_v3": (
        "DeepseekV3Config",
        {
            **MOE,
            "num_key_value_heads": 4,
            "first_k_dense_replace": 1,
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 8,
            "v_head_dim": 8,
        },
    ),
    "gpt_oss": (
        "GptOssConfig",
        {
            **MOE,
            "intermediate_size": 32,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "layer_types": ["sliding_attention", "full_attention"],
            "sliding_window": 16,
            "rope_scaling": None,
        },
    ),
    "gemma3_text": (
        "Gemma3TextConfig",
        {**COMMON, "head_dim": 8, "sliding_window": 8, "query_pre_attn_scalar": 8},
    ),
    "llama4_text": (
        "Llama4TextConfig",
        {
            **COMMON,
            "head_dim": 8,
            "intermediate_size_mlp": 64,
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
            "interleave_moe_layer_step": 1,
            "attention_chunk_size": 64,
        },
    ),
    "phi3": ("Phi3Config", {**COMMON, "pad_token_id": 0}),
    "qwen2_moe": (
        "Qwen2MoeConfig",
        {
            **MOE,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "shared_expert_intermediate_size": 48,
            "mlp_only_layers": [1],
        },
    ),
    "glm4_moe": (
        "Glm4MoeConfig",
        {
            **MOE,
            "first_k_dense_replace": 1,
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
        },
    ),
    "nemotron_h": (
        "NemotronHConfig",
        {
            **MOE,
            "num_hidden_layers": 4,
            "layers_block_type": ["mamba", "moe", "attention", "mlp"],
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "num_experts_per_tok": 2,
            "moe_shared_expert_intermediate_size": 48,
            "mamba_num_heads": 4,
            "mamba_head_dim": 8,
            "ssm_state_size": 16,
            "n_groups": 2,
            "pad_token_id": 0,
        },
    ),
}

MakeCheckpoint = Callable[..., Path]


def make_checkpoint(folder: Path, kind: str, *, seed: int = 0, **changes: Any) -> Path:
    """Write a tiny checkpoint; every matrix is scaled by its own power of two.

    Scales near one would hide a scale that is swapped or left out.
    """
    import transformers

    name, arguments = TINY[kind]
    if not hasattr(transformers, name):
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    config = getattr(transformers, name)(**{**arguments, **changes})
    torch.manual_seed(seed)
    with quiet_transformers():
        model = transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
        for index, parameter in enumerate(model.parameters()):
            with torch.no_grad():
                if parameter.ndim > 1:
                    parameter.normal_(0, 0.05).mul_(2.0 ** (index % 5 - 2))
                else:
                    parameter.add_(torch.randn_like(parameter) * 0.1)
        model.save_pretrained(folder)
    path = folder / "config.json"
    saved = json.loads(path.read_text())
    for key, value in arguments.items():  # 5.x renames keys when it saves; 4.57 then reads defaults
        saved.setdefault(key, value)
    path.write_text(json.dumps(saved, indent=2))
    return folder


@pytest.fixture(autouse=True, scope="session")
def no_syncs() -> Iterator[None]:
    """Spare the disk: a test writes files of a few kilobytes, and no power fails meanwhile.

    Where syncs matter (tests/helpers/killing.py), runs are processes of their own.
    """
    with pytest.MonkeyPatch.context() as patch:
        for name in ("fsync", "fdatasync"):
            patch.setattr(os, name, lambda fd: None)
        yield


@pytest.fixture
def checkpoint(tmp_path: Path) -> MakeCheckpoint:
    """Return a function (kind, **config changes) that writes a tiny checkpoint."""

    def make(kind: str, **changes: Any) -> Path:
        folder = tmp_path / f"source_{kind}"
        return make_checkpoint(folder, kind, **changes)

    return make


@pytest.fixture
def token_batches() -> list[torch.Tensor]:
    """Batches of token ids of different lengths, below a vocabulary of 64."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, 64, (2, length), generator=generator) for length in (16, 16, 9, 12)]


@pytest.fixture
def with_tokenizer() -> Callable[[Path], Path]:
    """Return a function that gives a checkpoint the byte-level tokenizer of the package's own."""

    def add(folder: Path) -> Path:
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copyfile(PACKAGED / name, folder / name)
        return folder

    return add
