"""Qwen4 (experimental), text only: delta nets and indexed attention, routed and shared experts."""

from __future__ import annotations

from modelopt_lite.models.registry import register
from modelopt_lite.models.specs import (
    ExpertStorageSpec,
    ExportSpec,
    ModelSpec,
    MoESpec,
    NamingSpec,
    PTQSpec,
)

# Classes, module names, norms and who reads them: measured on built models, transformers 5.24.0.
# Names on disk: files written by save_pretrained of the same release.
# No norm_feeds: attention and MLP read what the hyper-connections mixed, not a norm.
SPEC = register(
    ModelSpec(
        model_type="qwen4_exp_text",
        min_transformers_version="5.16",
        moe_spec=MoESpec(
            block_names=("Qwen4ExpTextSparseMoeBlock",),
            expert_linear_names=("gate_proj", "down_proj", "up_proj"),
            gate_up_pair=("gate_proj", "up_proj"),
        ),
        export_spec=ExportSpec(weight_plus_one_norm_names=("Qwen4ExpTextRMSNorm",)),
        ptq_spec=PTQSpec(
            layer_names=("Qwen4ExpTextDecoderLayer",),
            router_names=("gate", "shared_expert_gate"),
            skip_modules=("*hyper_connection*", "*.conv1d"),
            fused_linears=(
                ("q_proj", "k_proj", "v_proj"),
                ("gate_proj", "up_proj"),
                ("in_proj_qkv", "in_proj_z"),
                ("in_proj_b", "in_proj_a"),
            ),
        ),
        expert_storage_spec=ExpertStorageSpec(
            linear_names=("gate_proj", "up_proj", "down_proj"),
            stacked_names=("gate_up_proj", "down_proj"),
            shared_expert_names=("shared_expert",),
        ),
        naming_spec=NamingSpec(
            layer_linear_names=(
                "q_proj",
                "k_proj",
                "v_proj",
                "o_proj",
                "out_proj",
                "in_proj_a",
                "in_proj_b",
                "in_proj_qkv",
                "in_proj_z",
                "index_qk_proj",
                "gate_proj",
                "up_proj",
                "down_proj",
            )
        ),
    )
)
