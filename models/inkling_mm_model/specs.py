"""Inkling with its vision and audio towers."""

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

# Who reads the attention norm, as modules are called in memory and on disk.
_READS_INPUT = (
    *("self_attn.q_proj", "attn.wq_du"),
    *("self_attn.k_proj", "attn.wk_dv"),
    *("self_attn.v_proj", "attn.wv_dv"),
    *("self_attn.r_proj", "attn.wr_du"),
)

# Classes, module names, norms and who reads them: measured on built models, transformers 5.14.1.
# Names on disk: files written by save_pretrained of the same release.
# The norm before the experts feeds shared experts that no fold reaches.
SPEC = register(
    ModelSpec(
        model_type="inkling_mm_model",
        min_transformers_version="5.14",
        moe_spec=MoESpec(
            block_names=("InklingMoE",),
            expert_linear_names=("gate_proj", "down_proj", "up_proj"),
            gate_up_pair=("gate_proj", "up_proj"),
        ),
        ep_spec=EPSpec(plan_config_attr="text_config"),
        ptq_spec=PTQSpec(
            layer_names=("InklingDecoderLayer",),
            router_names=("gate",),
            skip_modules=(
                *("*vision_tower*", "*audio*", "*visual*", "*.proj"),
                *("*.k_sconv", "*.v_sconv", "*.attn_sconv", "*.mlp_sconv"),
                *("*.shared_w13_weight", "*.shared_w2_weight"),
            ),
            fused_linears=(("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")),
            norm_feeds=(
                ("input_layernorm", _READS_INPUT),
                ("attn_norm", _READS_INPUT),
            ),
        ),
        expert_storage_spec=ExpertStorageSpec(
            linear_names=("gate_proj", "up_proj", "down_proj"),
            stacked_names=("w13_weight", "w2_weight"),
            interleaved_gate_up=True,  # on disk; transformers puts gate before up as it loads
        ),
        naming_spec=NamingSpec(
            layer_linear_names=("wk_dv", "wo_ud", "wq_du", "wr_du", "wv_dv"),
            layer_lists=("model.llm.layers",),
            embedding_names=("model.llm.embed",),
            head_names=("lm_head", "model.llm.unembed"),
        ),
    )
)
