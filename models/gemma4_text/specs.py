"""Gemma 4, text only: experts, where there are any, run beside the MLP of the same layer."""

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

# Classes, module names, norms and who reads them: measured on built models, transformers 5.14.1 and
# 5.24.0. Names on disk: files written by save_pretrained of the same releases.
# The experts have no block of their own: router and experts are children of the layer, beside a
# dense MLP, and only where the config sets enable_moe_block.
SPEC = register(
    ModelSpec(
        model_type="gemma4_text",
        min_transformers_version="5.5",
        moe_spec=MoESpec(
            block_names=("Gemma4TextDecoderLayer",),
            expert_linear_names=("gate_proj", "down_proj", "up_proj"),
            gate_up_pair=("gate_proj", "up_proj"),
        ),
        ptq_spec=PTQSpec(
            layer_names=("Gemma4TextDecoderLayer",),
            router_names=("router",),
            skip_modules=("*per_layer_model_projection", "*embed_tokens_per_layer"),
            fused_linears=(("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")),
            norm_feeds=(
                ("input_layernorm", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
                ("pre_feedforward_layernorm", ("mlp.gate_proj", "mlp.up_proj")),
                ("pre_feedforward_layernorm_2", ("experts",)),
            ),
        ),
        expert_storage_spec=ExpertStorageSpec(
            linear_names=("gate_proj", "up_proj", "down_proj"),
            stacked_names=("gate_up_proj", "down_proj"),
        ),
        naming_spec=NamingSpec(
            layer_linear_names=(*GATED_LINEARS, "per_layer_input_gate", "per_layer_projection"),
            is_tied=True,
        ),
    )
)
