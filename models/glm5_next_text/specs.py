"""GLM-5-Next, text only: latent attention with an indexer, routed and shared experts."""

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
        model_type="glm5_next_text",
        min_transformers_version="5.16",
        moe_spec=MoESpec(
            block_names=("Glm5NextTextMoE",),
            expert_linear_names=("gate_proj", "down_proj", "up_proj"),
            gate_up_pair=("gate_proj", "up_proj"),
        ),
        ptq_spec=PTQSpec(
            layer_names=("Glm5NextTextDecoderLayer",),
            router_names=("gate",),
            # vLLM joins wk and weights_proj of the indexer in bfloat16 (deepseek_v2.py).
            skip_modules=(
                "*.indexer.wk",
                "*.indexer.weights_proj",
                "*.hc_*",
                "*_conv1d",
                "*.index_kpool_compress_*",
            ),
            fused_linears=(
                ("q_proj", "k_proj", "v_proj"),
                ("gate_proj", "up_proj"),
                ("q_a_proj", "kv_a_proj_with_mqa"),
            ),
            norm_feeds=(
                (
                    "post_attention_layernorm",
                    (
                        "mlp.gate_proj",
                        "mlp.up_proj",
                        "mlp.gate",
                        "mlp.experts",
                        "mlp.shared_experts.gate_proj",
                        "mlp.shared_experts.up_proj",
                    ),
                ),
                (
                    "input_layernorm",
                    (
                        "self_attn.q_a_proj",
                        "self_attn.kv_a_proj_with_mqa",
                        "self_attn.indexer.wk",
                        "self_attn.indexer.weights_proj",
                    ),
                ),
                ("self_attn.q_a_layernorm", ("self_attn.q_b_proj", "self_attn.indexer.wq_b")),
                ("self_attn.kv_a_layernorm", ("self_attn.kv_b_proj",)),
            ),
            # Loaded as bfloat16, these stay float32.
            keep_dtype_names=("base", "scale", "e_score_correction_bias", "A_log", "dt_bias"),
        ),
        expert_storage_spec=ExpertStorageSpec(
            linear_names=("gate_proj", "up_proj", "down_proj"),
            stacked_names=("gate_up_proj", "down_proj"),
            shared_expert_names=("shared_experts",),
        ),
        naming_spec=NamingSpec(
            layer_linear_names=(
                *GATED_LINEARS,
                "q_a_proj",
                "q_b_proj",
                "kv_a_proj_with_mqa",
                "kv_b_proj",
                "b_proj",
                "f_a_proj",
                "f_b_proj",
                "g_a_proj",
                "g_b_proj",
                "wq_b",
            ),
            layer_lists=("model.layers", "layers"),
            embedding_names=("embed_tokens",),
            head_names=(),
        ),
    )
)
