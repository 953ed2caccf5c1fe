"""MiniMax-M3 with its vision tower: norms that scale by weight + 1, routed and shared experts."""

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

# Classes, module names, norms and who reads them: measured on built models, transformers 5.14.1 and
# 5.24.0. Names on disk: files written by save_pretrained of the same releases.
SPEC = register(
    ModelSpec(
        model_type="minimax_m3_vl",
        min_transformers_version="5.12",
        moe_spec=MoESpec(
            block_names=("MiniMaxM3VLSparseMoeBlock",),
            expert_linear_names=("w1", "w2", "w3"),
            gate_up_pair=("w1", "w3"),
        ),
        export_spec=ExportSpec(weight_plus_one_norm_names=("MiniMaxM3VLRMSNorm",)),
        ep_spec=EPSpec(plan_config_attr="text_config"),
        ptq_spec=PTQSpec(
            layer_names=("MiniMaxM3VLDecoderLayer",),
            router_names=("gate",),
            skip_modules=("*multi_modal_projector*", "*vision_tower*", "*patch_merge_mlp*"),
            fused_linears=(("q_proj", "k_proj", "v_proj"), ("w1", "w3")),
            norm_feeds=(
                ("input_layernorm", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
                (
                    "post_attention_layernorm",
                    (
                        "mlp.shared_experts.gate_up_proj",
                        "block_sparse_moe.shared_experts.gate_proj",
                        "block_sparse_moe.shared_experts.up_proj",
                        "mlp.gate",
                        "block_sparse_moe.gate",
                        "mlp.experts",
                        "block_sparse_moe.experts",
                    ),
                ),
            ),
        ),
        expert_storage_spec=ExpertStorageSpec(
            linear_names=("w1", "w3", "w2"),
            stacked_names=("gate_up_proj", "down_proj"),
            shared_expert_names=("shared_experts",),
        ),
        naming_spec=NamingSpec(
            layer_linear_names=(*GATED_LINEARS, "w1", "w3", "w2"),
            layer_lists=("language_model.model.layers",),
            embedding_names=("language_model.model.embed_tokens",),
            head_names=("lm_head", "language_model.lm_head"),
        ),
    )
)
