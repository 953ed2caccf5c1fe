"""Jamba: layers of Mamba or attention, dense or with experts."""

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
# Expert parallelism: first release whose config class carries a plan (5.21.0).
SPEC = register(
    ModelSpec(
        model_type="jamba",
        min_transformers_version="4.57",
        moe_spec=MoESpec(
            block_names=("JambaSparseMoeBlock",),
            expert_linear_names=("gate_proj", "down_proj", "up_proj"),
            gate_up_pair=("gate_proj", "up_proj"),
        ),
        ep_spec=EPSpec(requires_transformers="5.21"),
        ptq_spec=PTQSpec(
            layer_names=("JambaAttentionDecoderLayer", "JambaMambaDecoderLayer"),
            router_names=("router",),
            # dt_proj is multiplied from the left, by no linear layer, where kernels are missing.
            skip_modules=("*.A_log", "*.conv1d", "*.dt_proj"),
            fused_linears=(("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")),
            norm_feeds=(
                (
                    "input_layernorm",
                    ("mamba.in_proj", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
                ),
                ("mamba.dt_layernorm", ("mamba.dt_proj",)),
                (
                    "pre_ff_layernorm",
                    (
                        "feed_forward.gate_proj",
                        "feed_forward.up_proj",
                        "feed_forward.router",
                        "feed_forward.experts",
                    ),
                ),
            ),
        ),
        expert_storage_spec=ExpertStorageSpec(
            linear_names=("gate_proj", "up_proj", "down_proj"),
            stacked_names=("gate_up_proj", "down_proj"),
        ),
        naming_spec=NamingSpec(
            layer_linear_names=(*GATED_LINEARS, "out_proj", "in_proj", "x_proj")
        ),
    )
)
