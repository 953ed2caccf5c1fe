"""ERNIE 4.5 VL: each layer has experts for text, experts for images, and shared ones."""

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

# Classes, module names, norms and who reads them: measured on built models, transformers 5.14.1 and
# 5.24.0. Names on disk: files written by save_pretrained of the same releases.
# Ernie4_5_VL_MoeSparseMoeBlock: the name in earlier releases.
# Expert parallelism: first release whose config class carries a plan (5.13.0).
SPEC = register(
    ModelSpec(
        model_type="ernie4_5_vl_moe",
        min_transformers_version="5.0",
        moe_spec=MoESpec(
            block_names=("Ernie4_5_VL_MoeSparseMoeBlock", "Ernie4_5_VLMoeSparseMoeBlock"),
            expert_linear_names=("gate_proj", "down_proj", "up_proj"),
            gate_up_pair=("gate_proj", "up_proj"),
        ),
        ep_spec=EPSpec(requires_transformers="5.13", plan_config_attr="text_config"),
        ptq_spec=PTQSpec(
            layer_names=("Ernie4_5_VLMoeDecoderLayer",),
            router_names=("gate",),
            skip_modules=(
                *("*resampler_model*", "*vision_tower*"),
                *("*vision_model*", "*.e_score_correction_bias"),
            ),
            fused_linears=(("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")),
            norm_feeds=(
                ("input_layernorm", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
                (
                    "post_attention_layernorm",
                    (
                        *("mlp.gate_proj", "mlp.up_proj"),
                        *("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"),
                        *("mlp.text_moe.gate", "mlp.text_moe.experts"),
                        "mlp.experts",
                    ),
                ),
            ),
            # Loaded as bfloat16, these stay float32.
            keep_dtype_names=("e_score_correction_bias",),
        ),
        expert_storage_spec=ExpertStorageSpec(
            linear_names=("gate_proj", "up_proj", "down_proj"),
            stacked_names=("gate_up_proj", "down_proj"),
        ),
        naming_spec=NamingSpec(layer_linear_names=GATED_LINEARS, is_tied=True),
    )
)
