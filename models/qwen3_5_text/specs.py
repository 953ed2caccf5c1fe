"""Qwen3.5 (dense), text only: gated delta nets and gated attention."""

from __future__ import annotations

from modelopt_lite.models.qwen3_5_moe_text.specs import LAYER_LINEARS
from modelopt_lite.models.registry import register
from modelopt_lite.models.specs import (
    ExportSpec,
    ModelSpec,
    NamingSpec,
    PTQSpec,
)

# Classes, module names, norms and who reads them: measured on built models, transformers 5.14.1 and
# 5.24.0. Names on disk: files written by save_pretrained of the same releases.
SPEC = register(
    ModelSpec(
        model_type="qwen3_5_text",
        min_transformers_version="5.2",
        export_spec=ExportSpec(weight_plus_one_norm_names=("Qwen3_5RMSNorm",)),
        ptq_spec=PTQSpec(
            layer_names=("Qwen3_5DecoderLayer",),
            skip_modules=("*.conv1d",),
            fused_linears=(
                ("q_proj", "k_proj", "v_proj"),
                ("gate_proj", "up_proj"),
                ("in_proj_qkv", "in_proj_z"),
                ("in_proj_b", "in_proj_a"),
            ),
            norm_feeds=(
                (
                    "input_layernorm",
                    (
                        "linear_attn.in_proj_qkv",
                        "linear_attn.in_proj_z",
                        "linear_attn.in_proj_b",
                        "linear_attn.in_proj_a",
                        "self_attn.q_proj",
                        "self_attn.k_proj",
                        "self_attn.v_proj",
                    ),
                ),
                ("post_attention_layernorm", ("mlp.gate_proj", "mlp.up_proj")),
            ),
        ),
        naming_spec=NamingSpec(layer_linear_names=LAYER_LINEARS),
    )
)
