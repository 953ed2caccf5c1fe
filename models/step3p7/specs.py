"""Step 3.7 with its vision tower: experts stacked on disk in three tensors."""

from __future__ import annotations

from modelopt_lite.models.registry import register
from modelopt_lite.models.specs import (
    GATED_LINEARS,
    EPSpec,
    ExpertStorageSpec,
    ExportSpec,
    ModelSpec,
    MoESpec,
    NamingSpec,
    PTQSpec,
)

_READS_INPUT = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.g_proj")

# Classes, module names, norms and who reads them: measured on built models, transformers 5.24.0.
# Names on disk: files written by save_pretrained of the same release. vLLM reads the stacks, and
# stacked scales beside them (read: step3p5.py).
SPEC = register(
    ModelSpec(
        model_type="step3p7",
        min_transformers_version="5.16",
        moe_spec=MoESpec(
            block_names=("Step3p7SparseMoeBlock",),
            expert_linear_names=("gate_proj", "down_proj", "up_proj"),
            gate_up_pair=("gate_proj", "up_proj"),
        ),
        export_spec=ExportSpec(weight_plus_one_norm_names=("Step3p7RMSNorm",)),
        ep_spec=EPSpec(plan_config_attr="text_config"),
        ptq_spec=PTQSpec(
            layer_names=("Step3p7DecoderLayer",),
            router_names=("gate", "moe.gate"),
            skip_modules=("*multi_modal_projector*", "*vision_model*", "*vit_large_projector*"),
            fused_linears=(("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")),
            norm_feeds=(
                ("input_layernorm", _READS_INPUT),
                (
                    "post_attention_layernorm",
                    (
                        *("mlp.gate_proj", "mlp.up_proj"),
                        *("mlp.shared_experts.gate_proj", "share_expert.gate_proj"),
                        *("mlp.shared_experts.up_proj", "share_expert.up_proj"),
                        *("mlp.gate", "moe.gate", "mlp.experts", "moe"),
                    ),
                ),
            ),
        ),
        expert_storage_spec=ExpertStorageSpec(
            container="moe",
            linear_names=("gate_proj", "up_proj", "down_proj"),
            stacked_names=("gate_proj", "up_proj", "down_proj"),
            export_stacked=True,
            shared_expert_names=("shared_experts", "share_expert"),
        ),
        naming_spec=NamingSpec(layer_linear_names=(*GATED_LINEARS, "g_proj")),
    )
)
