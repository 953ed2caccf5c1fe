"""Kimi Linear: delta attention and latent attention, experts w1, w3 and w2."""

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

_READS_INPUT = (
    *("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.kv_a_proj_with_mqa"),
    *("self_attn.forget_gate.f_a_proj", "self_attn.f_a_proj"),  # in memory and on disk
    *("self_attn.b_proj", "self_attn.g_a_proj"),
)
_MLP = ("gate_proj", "up_proj", "gate", "experts")
_SHARED = ("shared_experts.gate_proj", "shared_experts.up_proj")
_READS_MLP = tuple(  # in memory and on disk
    f"{block}.{reader}" for block in ("mlp", "block_sparse_moe") for reader in (*_MLP, *_SHARED)
)

# Classes, module names, norms and who reads them: measured on built models, transformers 5.24.0.
# Names on disk: files written by save_pretrained of the same release.
SPEC = register(
    ModelSpec(
        model_type="kimi_linear",
        min_transformers_version="5.17",
        moe_spec=MoESpec(
            block_names=("KimiLinearMoE",),
            expert_linear_names=("w1", "w2", "w3"),
            gate_up_pair=("w1", "w3"),
        ),
        ptq_spec=PTQSpec(
            layer_names=("KimiLinearDecoderLayer",),
            router_names=("gate",),
            skip_modules=("*_conv1d", "*.A_log"),
            fused_linears=(("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("w1", "w3")),
            norm_feeds=(
                ("input_layernorm", _READS_INPUT),
                ("post_attention_layernorm", _READS_MLP),
                ("self_attn.kv_a_layernorm", ("self_attn.kv_b_proj",)),
            ),
            # Loaded as bfloat16, these stay float32.
            keep_dtype_names=("e_score_correction_bias", "dt_bias"),
        ),
        expert_storage_spec=ExpertStorageSpec(
            linear_names=("w1", "w3", "w2"),
            stacked_names=("gate_up_proj", "down_proj"),
            shared_expert_names=("shared_experts",),
        ),
        naming_spec=NamingSpec(
            layer_linear_names=(
                *GATED_LINEARS,
                *("kv_a_proj_with_mqa", "kv_b_proj", "b_proj", "f_a_proj", "f_b_proj"),
                *("g_a_proj", "g_b_proj", "w1", "w3", "w2"),
            )
        ),
    )
)
