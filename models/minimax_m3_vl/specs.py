"""MiniMax-M3 with its vision tower: experts named w1 (gate), w3 (up), w2 on disk."""

from __future__ import annotations

from modelopt_lite.models.minimax_m3_vl_text.specs import SPEC as MINIMAX_M3_VL_TEXT
from modelopt_lite.models.registry import register
from modelopt_lite.models.specs import GATED_LINEARS, EPSpec
from modelopt_lite.models.variants import variant

# Who reads the norm before the experts, as modules are called in memory and on disk.
_READS_MLP = (
    "mlp.shared_experts.gate_up_proj",
    *("block_sparse_moe.shared_experts.gate_proj", "block_sparse_moe.shared_experts.up_proj"),
    *("mlp.gate", "block_sparse_moe.gate", "mlp.experts", "block_sparse_moe.experts"),
)

# Classes, module names, norms and who reads them: measured on built models, transformers 5.14.1 and
# 5.24.0. Names on disk: files written by save_pretrained of the same releases.
SPEC = register(
    variant(
        MINIMAX_M3_VL_TEXT,
        "minimax_m3_vl",
        moe_spec={"expert_linear_names": ("w1", "w2", "w3"), "gate_up_pair": ("w1", "w3")},
        ep_spec=EPSpec(plan_config_attr="text_config"),
        ptq_spec={
            "skip_modules": ("*multi_modal_projector*", "*vision_tower*", "*patch_merge_mlp*"),
            "fused_linears": (("q_proj", "k_proj", "v_proj"), ("w1", "w3")),
            "norm_feeds": (
                ("input_layernorm", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
                ("post_attention_layernorm", _READS_MLP),
            ),
        },
        expert_storage_spec={"linear_names": ("w1", "w3", "w2")},
        naming_spec={
            "layer_linear_names": (*GATED_LINEARS, "w1", "w3", "w2"),
            "layer_lists": ("language_model.model.layers",),
            "embedding_names": ("language_model.model.embed_tokens",),
            "head_names": ("lm_head", "language_model.lm_head"),
        },
    )
)
