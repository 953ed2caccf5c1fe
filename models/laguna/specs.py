"""Laguna: gated attention, dense first layers, then routed experts and a shared one."""

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

# Classes, module names, norms and who reads them: measured on built models, transformers 5.14.1 and
# 5.24.0. Names on disk: files written by save_pretrained of the same releases.
# Expert parallelism: first release whose config class carries a plan (5.13.0).
SPEC = register(
    ModelSpec(
        model_type="laguna",
        min_transformers_version="5.7",
        moe_spec=MoESpec(
            block_names=("LagunaSparseMoeBlock",),
            expert_linear_names=("gate_proj", "down_proj", "up_proj"),
            gate_up_pair=("gate_proj", "up_proj"),
        ),
        ep_spec=EPSpec(requires_transformers="5.13"),
        ptq_spec=PTQSpec(
            layer_names=("LagunaDecoderLayer",),
            router_names=("gate",),
            fused_linears=(("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")),
            norm_feeds=(
                (
                    "input_layernorm",
                    (
                        *("self_attn.q_proj", "self_attn.k_proj"),
                        *("self_attn.v_proj", "self_attn.g_proj"),
                    ),
                ),
                (
                    "post_attention_layernorm",
                    (
                        *("mlp.gate_proj", "mlp.up_proj"),
                        *("mlp.shared_experts.gate_proj", "mlp.shared_expert.gate_proj"),
                        *("mlp.shared_experts.up_proj", "mlp.shared_expert.up_proj"),
                        *("mlp.gate", "mlp.experts"),
                    ),
                ),
            ),
        ),
        expert_storage_spec=ExpertStorageSpec(
            linear_names=("gate_proj", "up_proj", "down_proj"),
            stacked_names=("gate_up_proj", "down_proj"),
            shared_expert_names=("shared_experts", "shared_expert"),
        ),
        naming_spec=NamingSpec(layer_linear_names=(*GATED_LINEARS, "g_proj")),
    )
)
