"""Granite 4 hybrid: layers of Mamba-2 or attention, stacked experts beside a shared MLP."""

from __future__ import annotations

from modelopt_lite.models.registry import register
from modelopt_lite.models.specs import (
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
# On disk the stacked experts lie in the block itself. vLLM splits them into experts.N.w1, w3 and w2
# when it loads them (read: granitemoe.py), so that is how single experts are called.
SPEC = register(
    ModelSpec(
        model_type="granitemoehybrid",
        min_transformers_version="4.57",
        moe_spec=MoESpec(
            block_names=("GraniteMoeHybridMoE",),
            expert_linear_names=("w1", "w2", "w3"),
            gate_up_pair=("w1", "w3"),
        ),
        ep_spec=EPSpec(requires_transformers="5.21"),
        ptq_spec=PTQSpec(
            layer_names=("GraniteMoeHybridDecoderLayer",),
            router_names=("router",),
            skip_modules=("*.conv1d",),
            fused_linears=(("q_proj", "k_proj", "v_proj"), ("w1", "w3")),
            norm_feeds=(
                (
                    "input_layernorm",
                    ("mamba.in_proj", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
                ),
                ("mamba.norm", ("mamba.out_proj",)),
                (
                    "post_attention_layernorm",
                    (
                        "shared_mlp.input_linear",
                        "block_sparse_moe.router",
                        "block_sparse_moe.experts",
                    ),
                ),
            ),
        ),
        expert_storage_spec=ExpertStorageSpec(
            linear_names=("w1", "w3", "w2"),
            stacked_names=("input_linear", "output_linear"),
            stacked_parent="",
        ),
        naming_spec=NamingSpec(
            layer_linear_names=(
                *("q_proj", "k_proj", "v_proj", "o_proj"),
                *("out_proj", "in_proj", "input_linear", "output_linear"),
            )
        ),
    )
)
