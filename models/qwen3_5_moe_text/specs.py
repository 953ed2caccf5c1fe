"""Qwen3.5-MoE, text only: gated delta nets and gated attention, routed and shared experts."""

from __future__ import annotations

from modelopt_lite.models.qwen3_next.specs import QKV, READS_MLP
from modelopt_lite.models.qwen3_next.specs import SPEC as QWEN3_NEXT
from modelopt_lite.models.registry import register
from modelopt_lite.models.specs import GATED_LINEARS
from modelopt_lite.models.variants import variant

_DELTA = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
LAYER_LINEARS = (*GATED_LINEARS, "out_proj", *_DELTA)

# Classes, module names, norms and who reads them: measured on built models, transformers 5.14.1 and
# 5.24.0. Names on disk: files written by save_pretrained of the same releases.
# Expert parallelism: first release whose config class carries a plan (5.13.0).
SPEC = register(
    variant(
        QWEN3_NEXT,
        "qwen3_5_moe_text",
        min_transformers_version="5.2",
        moe_spec={"block_names": ("Qwen3_5MoeSparseMoeBlock",)},
        export_spec={"weight_plus_one_norm_names": ("Qwen3_5MoeRMSNorm",)},
        ptq_spec={
            "layer_names": ("Qwen3_5MoeDecoderLayer",),
            "fused_linears": (
                *(("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")),
                *(("in_proj_qkv", "in_proj_z"), ("in_proj_b", "in_proj_a")),
            ),
            "norm_feeds": (
                ("input_layernorm", (*(f"linear_attn.{name}" for name in _DELTA), *QKV)),
                ("post_attention_layernorm", READS_MLP),
            ),
        },
        naming_spec={"layer_linear_names": LAYER_LINEARS},
    )
)
