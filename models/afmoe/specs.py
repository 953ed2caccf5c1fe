"""AFMoE (Arcee Trinity): gated attention, dense first layers, then routed and shared experts."""

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

_READS_INPUT = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.gate_proj")

# Classes, module names, norms and who reads them: measured on built models, transformers 5.14.1 and
# 5.24.0. Names on disk: files written by save_pretrained of the same releases.
# AfmoeMoE: the name in earlier releases.
# Expert parallelism: first release whose config class carries a plan (5.13.0).
SPEC = register(
    ModelSpec(
        model_type="afmoe",
        min_transformers_version="5.0",
        moe_spec=MoESpec(
            block_names=("AfmoeMoE", "AfmoeSparseMoeBlock"),
            expert_linear_names=("gate_proj", "down_proj", "up_proj"),
            gate_up_pair=("gate_proj", "up_proj"),
        ),
        ep_spec=EPSpec(requires_transformers="5.13"),
        ptq_spec=PTQSpec(
            layer_names=("AfmoeDecoderLayer",),
            router_names=("router",),
            fused_linears=(("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")),
            norm_feeds=(
                ("input_layernorm", _READS_INPUT),
                (
                    "pre_mlp_layernorm",
                    (
                        *("mlp.gate_proj", "mlp.up_proj"),
                        *("mlp.router.gate", "mlp.shared_experts.gate_proj"),
                        *("mlp.shared_experts.up_proj", "mlp.experts"),
                    ),
                ),
            ),
            # Loaded as bfloat16, these stay float32.
            keep_dtype_names=("expert_bias",),
        ),
        expert_storage_spec=ExpertStorageSpec(
            linear_names=("gate_proj", "up_proj", "down_proj"),
            stacked_names=("gate_up_proj", "down_proj"),
            shared_expert_names=("shared_experts",),
        ),
        naming_spec=NamingSpec(layer_linear_names=GATED_LINEARS),
    )
)
