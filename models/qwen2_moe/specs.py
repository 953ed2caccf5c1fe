"""Qwen2-MoE (Qwen1.5-MoE, Qwen2-57B-A14B): experts, and a shared one with its own gate."""

from __future__ import annotations

from modelopt_lite.models.registry import register
from modelopt_lite.models.specs import (
    GATED_LINEARS,
    EPSpec,
    ExpertStorageSpec,
    ExportSpec,
    ModelSpec,
    MoESpec,
    NamingSpec,
    PTQSpec,
)

# Classes, module names, norms and who reads them: measured on built models, transformers 4.57.6,
# 5.14.1 and 5.24.0. Names on disk: files written by save_pretrained of the same releases.
# Expert parallelism: first release whose config class carries a plan (5.13.0).
# Grouped export: NVIDIA Model Optimizer 0.47.0, layer_utils.get_experts_list.
SPEC = register(
    ModelSpec(
        model_type="qwen2_moe",
        min_transformers_version="4.57",
        moe_spec=MoESpec(
            block_names=("Qwen2MoeSparseMoeBlock",),
            expert_linear_names=("gate_proj", "down_proj", "up_proj"),
            gate_up_pair=("gate_proj", "up_proj"),
        ),
        export_spec=ExportSpec(grouped_expert_export=True),
        ep_spec=EPSpec(requires_transformers="5.13"),
        ptq_spec=PTQSpec(
            layer_names=("Qwen2MoeDecoderLayer",),
            router_names=("gate", "shared_expert_gate"),  # the second has one output
            fused_linears=(("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")),
            norm_feeds=(
                ("input_layernorm", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
                (
                    "post_attention_layernorm",
                    (
                        "mlp.gate",
                        "mlp.experts",
                        "mlp.shared_expert.gate_proj",
                        "mlp.shared_expert.up_proj",
                        "mlp.shared_expert_gate",
                        "mlp.gate_proj",  # layers of mlp_only_layers are dense
                        "mlp.up_proj",
                    ),
                ),
            ),
        ),
        expert_storage_spec=ExpertStorageSpec(
            linear_names=("gate_proj", "up_proj", "down_proj"),
            stacked_names=("gate_up_proj", "down_proj"),
            shared_expert_names=("shared_expert",),
        ),
        naming_spec=NamingSpec(layer_linear_names=GATED_LINEARS),
    )
)
