"""Sarvam MoE: the block of GLM-4.5."""

from __future__ import annotations

from modelopt_lite.models.registry import register
from modelopt_lite.models.specs import ExpertStorageSpec, ModelSpec, MoESpec, NamingSpec, PTQSpec

# Classes, module names, norms and who reads them: measured on built models, transformers 5.24.0.
# Names on disk: files written by save_pretrained of the same release.
SPEC = register(
    ModelSpec(
        model_type="sarvam_moe",
        min_transformers_version="5.24",
        moe_spec=MoESpec(
            block_names=("Glm4MoeMoE",),
            expert_linear_names=("gate_proj", "down_proj", "up_proj"),
            gate_up_pair=("gate_proj", "up_proj"),
        ),
        ptq_spec=PTQSpec(
            layer_names=("Glm4MoeDecoderLayer",),
            router_names=("gate",),
            fused_linears=(("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")),
            norm_feeds=(
                (
                    "input_layernorm",
                    (
                        "self_attn.q_proj",
                        "attention.query_key_value",
                        "self_attn.k_proj",
                        "self_attn.v_proj",
                    ),
                ),
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
            ),
            # Loaded as bfloat16, these stay float32.
            keep_dtype_names=("e_score_correction_bias",),
        ),
        expert_storage_spec=ExpertStorageSpec(
            linear_names=("gate_proj", "up_proj", "down_proj"),
            stacked_names=("gate_up_proj", "down_proj"),
            shared_expert_names=("shared_experts",),
        ),
        naming_spec=NamingSpec(
            layer_linear_names=("query_key_value", "dense", "gate_proj", "up_proj", "down_proj"),
            embedding_names=("model.word_embeddings",),
        ),
    )
)
