"""Tiny seeded models of many architectures, and a store that shows any use of absent weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from modelopt_lite.build import quiet_transformers
from modelopt_lite.offload import Unit, find_units

COMMON: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MOE: dict[str, Any] = {**COMMON, "moe_intermediate_size": 24, "num_experts_per_tok": 2}

# model_type -> (fields of its config, class names of its layers; none: found by structure).
MODELS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "llama": (COMMON, ("LlamaDecoderLayer",)),
    "llama_tied": ({**COMMON, "tie_word_embeddings": True}, ("LlamaDecoderLayer",)),
    "gemma3_text": (
        {**COMMON, "sliding_window": 4, "query_pre_attn_scalar": 8, "num_hidden_layers": 7},
        ("Gemma3DecoderLayer",),
    ),
    "qwen3_moe": ({**MOE, "num_experts": 4}, ("Qwen3MoeDecoderLayer",)),
    "gpt_oss": (
        {**MOE, "intermediate_size": 32, "num_local_experts": 4, "sliding_window": 4},
        ("GptOssDecoderLayer",),
    ),
    "deepseek_v3": (
        {
            **MOE,
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
        ("DeepseekV3DecoderLayer",),
    ),
    "qwen3_next": (
        {
            **MOE,
            "num_experts": 4,
            "shared_expert_intermediate_size": 24,
            "num_hidden_layers": 4,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
        },
        ("Qwen3NextDecoderLayer",),
    ),
    "nemotron_h": (
        {
            **MOE,
            "num_hidden_layers": 4,
            "n_routed_experts": 4,
            "n_groups": 2,
            "mamba_num_heads": 4,
            "mamba_head_dim": 12,
            "ssm_state_size": 16,
            "moe_shared_expert_intermediate_size": 24,
            "moe_latent_size": None,
            "layers_block_type": ["mamba", "moe", "attention", "mlp"],
        },
        ("NemotronHBlock",),
    ),
    "llama4_text": (
        {
            **COMMON,
            "intermediate_size_mlp": 48,
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
            "interleave_moe_layer_step": 2,
            "attention_chunk_size": 8,
        },
        ("Llama4TextDecoderLayer",),
    ),
    "jamba": (
        {
            **MOE,
            "num_hidden_layers": 4,
            "num_experts": 4,
            "use_mamba_kernels": False,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "mamba_dt_rank": 4,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
        },
        ("JambaAttentionDecoderLayer", "JambaMambaDecoderLayer"),
    ),
    "t5": (
        {
            "vocab_size": 64,
            "d_model": 32,
            "d_kv": 8,
            "d_ff": 48,
            "num_layers": 3,
            "num_decoder_layers": 2,
            "num_heads": 4,
            "decoder_start_token_id": 0,
        },
        ("T5Block",),
    ),
    "bart": (
        {
            "vocab_size": 64,
            "d_model": 32,
            "encoder_layers": 2,
            "decoder_layers": 3,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 48,
            "decoder_ffn_dim": 48,
            "max_position_embeddings": 64,
        },
        (),
    ),
    "albert": (
        {**COMMON, "embedding_size": 16, "num_hidden_layers": 4},
        ("AlbertLayer",),
    ),
}
ENCODER_DECODERS = ("t5", "bart")


def build(name: str) -> Any:
    """Build a seeded float32 model; skip where the installed transformers does not know it."""
    import transformers

    fields, _ = MODELS[name]
    model_type = name.removesuffix("_tied")
    if model_type not in transformers.CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} does not know {model_type}")
    auto = transformers.AutoModelForCausalLM
    if name in ENCODER_DECODERS:
        auto = transformers.AutoModelForSeq2SeqLM
    elif name == "albert":
        auto = transformers.AutoModelForMaskedLM
    torch.manual_seed(0)
    with quiet_transformers():
        model = auto.from_config(transformers.AutoConfig.for_model(model_type, **fields))
        for parameter in model.parameters():
            if parameter.ndim > 1:
                torch.nn.init.normal_(parameter, 0, 0.2)
        return model.float().eval().requires_grad_(False)


def call(name: str, model: Any, ids: Tensor) -> Tensor:
    """Return the logits of one batch."""
    kwargs: dict[str, Any] = {"decoder_input_ids": ids[:, :4]} if name in ENCODER_DECODERS else {}
    if name != "albert":
        kwargs["use_cache"] = False
    logits: Tensor = model(input_ids=ids, **kwargs).logits
    return logits


class PoisonStore:
    """Keeps clones of the entries; those of a unit that is out are NaN in the model."""

    def __init__(self, model: nn.Module, units: Sequence[Unit]) -> None:
        self.units = {unit.name: unit for unit in units}
        self.modules = {name: model.get_submodule(name) for name in self.units if name}
        self.log: list[tuple[str, str]] = []
        self._entries = model.state_dict(keep_vars=True)
        self._values = {name: t.detach().clone() for name, t in self._entries.items()}
        for name in self.modules:
            self._poison(name)
        if "" in self.units:
            self._restore("")

    def enter(self, name: str) -> None:
        self.log.append(("enter", name))
        self._restore(name)

    def leave(self, name: str) -> None:
        self.log.append(("leave", name))
        self._poison(name)

    def restore_all(self) -> None:
        for name in self.units:
            self._restore(name)

    def _restore(self, name: str) -> None:
        with torch.no_grad():
            for entry in self.units[name].entries:
                self._entries[entry].copy_(self._values[entry])

    def _poison(self, name: str) -> None:
        with torch.no_grad():
            for entry in self.units[name].entries:
                if self._entries[entry].is_floating_point():
                    self._entries[entry].fill_(torch.nan)


@pytest.fixture(params=MODELS)
def tiny(request: pytest.FixtureRequest) -> tuple[str, Any, list[Unit]]:
    """One of the models: (name, model, its units)."""
    model = build(request.param)
    return request.param, model, find_units(model, MODELS[request.param][1])


@pytest.fixture
def build_tiny() -> Callable[[str], tuple[Any, list[Unit]]]:
    """Return a function: name -> (model, its units)."""

    def make(name: str) -> tuple[Any, list[Unit]]:
        model = build(name)
        return model, find_units(model, MODELS[name][1])

    return make


@pytest.fixture
def forward() -> Callable[[str, Any, Tensor], Tensor]:
    """Return the function (name, model, ids) -> logits."""
    return call


@pytest.fixture
def poison() -> type[PoisonStore]:
    """Return the class of the store."""
    return PoisonStore


@pytest.fixture
def batches() -> list[Tensor]:
    """Batches of ids of different lengths and sizes."""
    generator = torch.Generator().manual_seed(3)
    sizes = ((2, 7), (1, 12), (3, 5))
    return [torch.randint(3, 64, size, generator=generator) for size in sizes]
