"""Doge: attention and a gated MLP, to which an embedding adds experts of one neuron each."""

from __future__ import annotations

from modelopt_lite.models.registry import register
from modelopt_lite.models.specs import (
    GATED_LINEARS,
    EPSpec,
    ExpertStorageSpec,
    ModelSpec,
    MoESpec,
    NamingSpec,
    PTQSpec,
)

# Classes and names: built models, transformers 5.14.1 and 5.24.0, dense; with is_moe the block is
# DogeCDMoE, whose experts are rows of two embeddings. These, and the router, stay as they are.
SPEC = register(
    ModelSpec(
        model_type="doge",
        min_transformers_version="4.57",
        moe_spec=MoESpec(block_names=("DogeCDMoE",)),
        ep_spec=EPSpec(unsupported="its experts are rows of an embedding"),
        ptq_spec=PTQSpec(
            layer_names=("DogeDecoderLayer",),
            router_names=("router_gate",),
            skip_modules=("*.down_embed", "*.up_embed", "*.dt_proj"),
            fused_linears=(("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")),
        ),
        expert_storage_spec=ExpertStorageSpec(),
        naming_spec=NamingSpec(layer_linear_names=GATED_LINEARS),
    )
)
