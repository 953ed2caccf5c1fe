"""Lara Mini: gated delta nets and attention as in Qwen3.5-MoE, routed experts and a shared one."""

from __future__ import annotations

from modelopt_lite.models.qwen3_5_moe_text.specs import SPEC as QWEN3_5_MOE_TEXT
from modelopt_lite.models.registry import register
from modelopt_lite.models.specs import GATED_LINEARS
from modelopt_lite.models.variants import variant

_READS_INPUT = (
    *("linear_attn.in_proj_qkv", "linear_attn.in_proj", "linear_attn.in_proj_z"),
    *("linear_attn.in_proj_b", "linear_attn.in_proj_a"),
    *("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
)
_READS_MLP = (
    *("mlp.gate", "mlp.experts"),
    *("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"),
)

# Classes, module names, norms and who reads them: measured on built models, transformers 5.24.0.
# Names on disk: files written by save_pretrained of the same release.
SPEC = register(
    variant(
        QWEN3_5_MOE_TEXT,
        "lara_mini",
        min_transformers_version="5.24",
        moe_spec={"block_names": ("LaraMiniSparseMoeBlock",)},
        export_spec=None,
        ep_spec=None,
        ptq_spec={
            "layer_names": ("LaraMiniDecoderLayer",),
            "router_names": ("gate",),
            "norm_feeds": (
                ("input_layernorm", _READS_INPUT),
                ("linear_attn.norm", ("linear_attn.out_proj",)),
                ("post_attention_layernorm", _READS_MLP),
            ),
        },
        naming_spec={
            "layer_linear_names": (*GATED_LINEARS, "out_proj", "in_proj"),
            "is_tied": True,
        },
    )
)
