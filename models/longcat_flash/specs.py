"""LongCat-Flash: two attentions and two MLPs a layer around one mixture of experts."""

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
# The first post_attention_layernorm feeds the experts without weights too, which pass on what they
# read: no scale may be folded into it.
SPEC = register(
    ModelSpec(
        model_type="longcat_flash",
        min_transformers_version="4.57",
        moe_spec=MoESpec(
            block_names=("LongcatFlashMoE",),
            expert_linear_names=("gate_proj", "down_proj", "up_proj"),
            gate_up_pair=("gate_proj", "up_proj"),
        ),
        ep_spec=EPSpec(
            unsupported=(
                "its router also chooses experts that have no weights, and release 5 "
                "stores rows for them: the ranks' shares of the experts would not be "
                "alike"
            )
        ),
        ptq_spec=PTQSpec(
            layer_names=("LongcatFlashDecoderLayer",),
            router_names=("router",),
            fused_linears=(("gate_proj", "up_proj"), ("q_a_proj", "kv_a_proj_with_mqa")),
            norm_feeds=(
                ("input_layernorm.0", ("self_attn.0.q_a_proj", "self_attn.0.kv_a_proj_with_mqa")),
                ("self_attn.0.q_a_layernorm", ("self_attn.0.q_b_proj",)),
                ("input_layernorm.1", ("self_attn.1.q_a_proj", "self_attn.1.kv_a_proj_with_mqa")),
                ("self_attn.1.q_a_layernorm", ("self_attn.1.q_b_proj",)),
                ("post_attention_layernorm.1", ("mlps.1.gate_proj", "mlps.1.up_proj")),
            ),
        ),
        expert_storage_spec=ExpertStorageSpec(
            linear_names=("gate_proj", "up_proj", "down_proj"),
            stacked_names=("gate_up_proj", "down_proj"),
        ),
        naming_spec=NamingSpec(
            layer_linear_names=(
                *("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"),
                *("o_proj", "gate_proj", "up_proj", "down_proj"),
            ),
            layer_count_keys=("num_layers", "num_hidden_layers"),
        ),
    )
)
