"""Qwen3-Next: gated delta nets and gated attention, routed experts and a shared one."""

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

QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
READS_MLP = (
    *("mlp.gate", "mlp.experts", "mlp.shared_expert_gate"),
    *("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"),
)

# Classes, module names, norms and who reads them: measured on built models, transformers 5.14.1 and
# 5.24.0. Names on disk: files written by save_pretrained of the same releases.
# Expert parallelism: first release whose config class carries a plan (5.13.0).
SPEC = register(
    ModelSpec(
        model_type="qwen3_next",
        min_transformers_version="4.57",
        moe_spec=MoESpec(
            block_names=("Qwen3NextSparseMoeBlock",),
            expert_linear_names=("gate_proj", "down_proj", "up_proj"),
            gate_up_pair=("gate_proj", "up_proj"),
        ),
        export_spec=ExportSpec(weight_plus_one_norm_names=("Qwen3NextRMSNorm",)),
        ep_spec=EPSpec(requires_transformers="5.13"),
        ptq_spec=PTQSpec(
            layer_names=("Qwen3NextDecoderLayer",),
            router_names=("gate", "shared_expert_gate"),
            skip_modules=("*.conv1d",),
            fused_linears=(("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")),
            norm_feeds=(
                ("input_layernorm", ("linear_attn.in_proj_qkvz", "linear_attn.in_proj_ba", *QKV)),
                ("post_attention_layernorm", (*READS_MLP, "mlp.gate_proj", "mlp.up_proj")),
            ),
        ),
        expert_storage_spec=ExpertStorageSpec(
            linear_names=("gate_proj", "up_proj", "down_proj"),
            stacked_names=("gate_up_proj", "down_proj"),
            shared_expert_names=("shared_expert",),
        ),
        naming_spec=NamingSpec(
            layer_linear_names=(*GATED_LINEARS, "out_proj", "in_proj_ba", "in_proj_qkvz")
        ),
    )
)
