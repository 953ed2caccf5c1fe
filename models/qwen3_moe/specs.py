"""Qwen3-MoE (Qwen3-30B-A3B, Qwen3-235B-A22B): GQA with norms on q and k, no shared expert."""

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

# Fuse rules: NVIDIA Model Optimizer 0.47.0, export. o_proj reads sums over tokens of v_proj's
# channels, down_proj reads up_proj's output times a gate: a scale of a channel passes through.
# With fewer v_proj rows than o_proj reads (GQA) the exporter skips the first rule.
# Classes, module names, norms and who reads them: measured on built models, transformers 4.57.6,
# 5.14.1 and 5.24.0. Names on disk: files written by save_pretrained of the same releases.
# Expert parallelism: first release whose config class carries a plan (5.7.0).
# Grouped export: NVIDIA Model Optimizer 0.47.0, layer_utils.get_experts_list.
SPEC = register(
    ModelSpec(
        model_type="qwen3_moe",
        min_transformers_version="4.57",
        moe_spec=MoESpec(
            block_names=("Qwen3MoeSparseMoeBlock",),
            expert_linear_names=("gate_proj", "down_proj", "up_proj"),
            gate_up_pair=("gate_proj", "up_proj"),
        ),
        export_spec=ExportSpec(
            grouped_expert_export=True,
            pqs_fuse_rules=(
                (("Qwen3MoeAttention",), "v_proj", "o_proj"),
                (("Qwen3MoeMLP",), "up_proj", "down_proj"),
            ),
        ),
        ep_spec=EPSpec(requires_transformers="5.7"),
        ptq_spec=PTQSpec(
            layer_names=("Qwen3MoeDecoderLayer",),
            router_names=("gate",),
            fused_linears=(("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")),
            norm_feeds=(
                ("input_layernorm", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
                (
                    "post_attention_layernorm",
                    # Layers of mlp_only_layers are dense.
                    ("mlp.gate", "mlp.experts", "mlp.gate_proj", "mlp.up_proj"),
                ),
            ),
        ),
        expert_storage_spec=ExpertStorageSpec(
            linear_names=("gate_proj", "up_proj", "down_proj"),
            stacked_names=("gate_up_proj", "down_proj"),
        ),
        naming_spec=NamingSpec(layer_linear_names=GATED_LINEARS),
    )
)
