"""DeepSeek-V3 and R1: latent attention (MLA), dense layers, then routed and shared experts."""

from __future__ import annotations

from modelopt_lite.models.registry import register
from modelopt_lite.models.specs import (
    LATENT_LINEARS,
    EPSpec,
    ExpertStorageSpec,
    ModelSpec,
    MoESpec,
    NamingSpec,
    PTQSpec,
)

_READS_INPUT = ("self_attn.q_a_proj", "self_attn.q_proj", "self_attn.kv_a_proj_with_mqa")
READS_MLP = (
    *("mlp.gate_proj", "mlp.up_proj", "mlp.gate", "mlp.experts"),
    *("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"),
)

# Classes, module names, norms and who reads them: measured on built models, transformers 4.57.6,
# 5.14.1 and 5.24.0. Names on disk: files written by save_pretrained of the same releases.
# The key-value names stay k_proj and v_proj, which MLA lacks: engines look for the scales there.
# Expert parallelism: first release whose config class carries a plan (5.13.0).
SPEC = register(
    ModelSpec(
        model_type="deepseek_v3",
        min_transformers_version="4.57",
        moe_spec=MoESpec(
            block_names=("DeepseekV3MoE",),
            expert_linear_names=("gate_proj", "down_proj", "up_proj"),
            gate_up_pair=("gate_proj", "up_proj"),
        ),
        ep_spec=EPSpec(requires_transformers="5.13"),
        ptq_spec=PTQSpec(
            layer_names=("DeepseekV3DecoderLayer",),
            router_names=("gate",),
            # What only the extra prediction layer has (vLLM, deepseek_mtp.py).
            # Its index is num_hidden_layers, so no glob can name the whole layer.
            skip_modules=("*.eh_proj", "*.shared_head.*"),
            fused_linears=(("q_a_proj", "kv_a_proj_with_mqa"), ("gate_proj", "up_proj")),
            norm_feeds=(
                ("input_layernorm", _READS_INPUT),
                ("self_attn.q_a_layernorm", ("self_attn.q_b_proj",)),
                ("self_attn.kv_a_layernorm", ("self_attn.kv_b_proj",)),
                ("post_attention_layernorm", READS_MLP),
            ),
            keep_dtype_names=("e_score_correction_bias",),  # 4.57.6 casts it
        ),
        expert_storage_spec=ExpertStorageSpec(
            linear_names=("gate_proj", "up_proj", "down_proj"),
            stacked_names=("gate_up_proj", "down_proj"),
            shared_expert_names=("shared_experts",),
        ),
        naming_spec=NamingSpec(
            layer_linear_names=("q_proj", *LATENT_LINEARS, "gate_proj", "up_proj", "down_proj")
        ),
    )
)
