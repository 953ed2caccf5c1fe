"""dots3 note, text only: latent attention, dense first layers, then experts."""

from __future__ import annotations

from modelopt_lite.models.registry import register
from modelopt_lite.models.specs import ExpertStorageSpec, ModelSpec, MoESpec, NamingSpec, PTQSpec

# Classes, module names, norms and who reads them: measured on built models, transformers 5.24.0.
# Names on disk: files written by save_pretrained of the same release.
SPEC = register(
    ModelSpec(
        model_type="dots3_note_text",
        min_transformers_version="5.23",
        moe_spec=MoESpec(
            block_names=("Dots3NoteTextMoE",),
            expert_linear_names=("gate_proj", "down_proj", "up_proj"),
            gate_up_pair=("gate_proj", "up_proj"),
        ),
        ptq_spec=PTQSpec(
            layer_names=("Dots3NoteTextDecoderLayer",),
            router_names=("gate",),
            # vLLM joins wk and weights_proj of the indexer in bfloat16 (deepseek_v2.py).
            skip_modules=("*.indexer.wk", "*.indexer.weights_proj"),
            fused_linears=(("gate_proj", "up_proj"), ("q_a_proj", "kv_a_proj_with_mqa")),
            norm_feeds=(
                (
                    "input_layernorm",
                    (
                        *("self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa"),
                        *("self_attn.indexer.wk", "self_attn.indexer.weights_proj"),
                        "self_attn.g_proj",
                    ),
                ),
                (
                    "post_attention_layernorm",
                    (
                        *("mlp.gate_proj", "mlp.up_proj"),
                        *("mlp.gate", "mlp.experts"),
                        *("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"),
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
            layer_linear_names=(
                *("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"),
                *("g_proj", "wq_b", "gate_proj", "up_proj", "down_proj"),
            )
        ),
    )
)
