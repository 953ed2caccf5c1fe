"""Bailing hybrid: linear and latent attention, routed and shared experts."""

from __future__ import annotations

from modelopt_lite.models.deepseek_v3.specs import READS_MLP
from modelopt_lite.models.registry import register
from modelopt_lite.models.specs import ExpertStorageSpec, ModelSpec, MoESpec, NamingSpec, PTQSpec

# Classes, module names, norms and who reads them: measured on built models, transformers 5.24.0.
# Names on disk: files written by save_pretrained of the same release.
SPEC = register(
    ModelSpec(
        model_type="bailing_hybrid",
        min_transformers_version="5.20",
        moe_spec=MoESpec(
            block_names=("BailingHybridMoE",),
            expert_linear_names=("gate_proj", "down_proj", "up_proj"),
            gate_up_pair=("gate_proj", "up_proj"),
        ),
        ptq_spec=PTQSpec(
            layer_names=("BailingHybridDecoderLayer",),
            router_names=("gate",),
            skip_modules=("*_conv1d",),
            fused_linears=(("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")),
            norm_feeds=(
                (
                    "input_layernorm",
                    (
                        *("self_attn.q_proj", "attention.q_proj", "self_attn.k_proj"),
                        *("attention.k_proj", "self_attn.v_proj", "attention.v_proj"),
                        *("self_attn.forget_gate.f_proj", "attention.f_proj", "self_attn.b_proj"),
                        *("attention.b_proj", "self_attn.g_proj", "attention.g_proj"),
                        *("self_attn.kv_a_proj_with_mqa", "attention.kv_a_proj_with_mqa"),
                    ),
                ),
                ("self_attn.o_norm", ("self_attn.o_proj", "attention.dense")),
                ("attention.o_norm", ("self_attn.o_proj",)),
                ("post_attention_layernorm", READS_MLP),
                ("self_attn.kv_a_layernorm", ("self_attn.kv_b_proj", "attention.kv_b_proj")),
                ("attention.kv_a_layernorm", ("self_attn.kv_b_proj", "attention.kv_b_proj")),
            ),
            # Loaded as bfloat16, these stay float32.
            keep_dtype_names=("e_score_correction_bias", "A_log", "dt_bias"),
        ),
        expert_storage_spec=ExpertStorageSpec(
            linear_names=("gate_proj", "up_proj", "down_proj"),
            stacked_names=("gate_up_proj", "down_proj"),
            shared_expert_names=("shared_experts",),
        ),
        naming_spec=NamingSpec(
            layer_linear_names=(
                *("q_proj", "k_proj", "v_proj", "kv_a_proj_with_mqa", "kv_b_proj", "b_proj"),
                *("dense", "f_proj", "g_proj", "gate_proj", "up_proj", "down_proj"),
            ),
            embedding_names=("model.word_embeddings",),
        ),
    )
)
