"""DeepSeek-V3.2: DeepSeek-V3 whose attention picks its tokens by an indexer."""

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
# Expert parallelism: first release whose config class carries a plan (5.13.0).
SPEC = register(
    ModelSpec(
        model_type="deepseek_v32",
        min_transformers_version="5.11",
        moe_spec=MoESpec(
            block_names=("DeepseekV32MoE",),
            expert_linear_names=("gate_proj", "down_proj", "up_proj"),
            gate_up_pair=("gate_proj", "up_proj"),
        ),
        ep_spec=EPSpec(requires_transformers="5.13"),
        ptq_spec=PTQSpec(
            layer_names=("DeepseekV32DecoderLayer",),
            router_names=("gate",),
            # vLLM joins wk and weights_proj of the indexer in bfloat16 (deepseek_v2.py).
            # The others as in deepseek_v3.
            skip_modules=("*.indexer.wk", "*.indexer.weights_proj", "*.eh_proj", "*.shared_head.*"),
            fused_linears=(("gate_proj", "up_proj"), ("q_a_proj", "kv_a_proj_with_mqa")),
            norm_feeds=(
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
            layer_linear_names=(
                "q_a_proj",
                "q_b_proj",
                "kv_a_proj_with_mqa",
                "kv_b_proj",
                "o_proj",
                "wq_b",
                "gate_proj",
                "up_proj",
                "down_proj",
            )
        ),
    )
)
