"""Lara Mini: stacked experts on disk, routed and a shared one."""

from __future__ import annotations

from modelopt_lite.models.registry import register
from modelopt_lite.models.specs import (
    GATED_LINEARS,
    ExpertStorageSpec,
    ModelSpec,
    MoESpec,
    NamingSpec,
    PTQSpec,
)

# Classes, module names, norms and who reads them: measured on built models, transformers 5.24.0.
# Names on disk: files written by save_pretrained of the same release.
SPEC = register(
    ModelSpec(
        model_type="lara_mini",
        min_transformers_version="5.24",
        moe_spec=MoESpec(
            block_names=("LaraMiniSparseMoeBlock",),
            expert_linear_names=("gate_proj", "down_proj", "up_proj"),
            gate_up_pair=("gate_proj", "up_proj"),
        ),
        ptq_spec=PTQSpec(
            layer_names=("LaraMiniDecoderLayer",),
            router_names=("gate",),
            skip_modules=("*.conv1d",),
            fused_linears=(
                ("q_proj", "k_proj", "v_proj"),
                ("gate_proj", "up_proj"),
                ("in_proj_qkv", "in_proj_z"),
                ("in_proj_b", "in_proj_a"),
            ),
            norm_feeds=(
                (
                    "input_layernorm",
                    (
                        *("linear_attn.in_proj_qkv", "linear_attn.in_proj"),
                        *("linear_attn.in_proj_z", "linear_attn.in_proj_b"),
                        *("linear_attn.in_proj_a", "self_attn.q_proj"),
                        *("self_attn.k_proj", "self_attn.v_proj"),
                    ),
                ),
                ("linear_attn.norm", ("linear_attn.out_proj",)),
                (
                    "post_attention_layernorm",
                    (
                        *("mlp.gate", "mlp.experts"),
                        *("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"),
                    ),
                ),
            ),
        ),
        expert_storage_spec=ExpertStorageSpec(
            linear_names=("gate_proj", "up_proj", "down_proj"),
            stacked_names=("gate_up_proj", "down_proj"),
            shared_expert_names=("shared_expert",),
        ),
        naming_spec=NamingSpec(
            layer_linear_names=(*GATED_LINEARS, "out_proj", "in_proj"),
            is_tied=True,
        ),
    )
)
