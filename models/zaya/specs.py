"""Zaya: convolutional attention, experts stacked on disk."""

from __future__ import annotations

from modelopt_lite.models.registry import register
from modelopt_lite.models.specs import ExpertStorageSpec, ModelSpec, MoESpec, NamingSpec, PTQSpec

# Classes, module names, norms and who reads them: measured on built models, transformers 5.14.1 and
# 5.24.0. Names on disk: files written by save_pretrained of the same releases.
SPEC = register(
    ModelSpec(
        model_type="zaya",
        min_transformers_version="5.13",
        moe_spec=MoESpec(
            block_names=("ZayaSparseMoeBlock",),
            expert_linear_names=("gate_proj", "down_proj", "up_proj"),
            gate_up_pair=("gate_proj", "up_proj"),
        ),
        ptq_spec=PTQSpec(
            layer_names=("ZayaDecoderLayer",),
            router_names=("gate",),
            skip_modules=("*.conv_qk_depthwise", "*.conv_qk_grouped"),
            fused_linears=(("gate_proj", "up_proj"),),
            norm_feeds=(
                (
                    "input_layernorm",
                    (
                        "self_attn.qkv_proj.q_proj",
                        "self_attn.qkv_proj.k_proj",
                        "self_attn.qkv_proj.v_proj_current",
                        "self_attn.qkv_proj.v_proj_delayed",
                    ),
                ),
                ("post_attention_layernorm", ("mlp.gate.down_proj", "mlp.experts")),
            ),
            # Loaded as bfloat16, these stay float32.
            keep_dtype_names=("balancing_biases",),
        ),
        expert_storage_spec=ExpertStorageSpec(
            linear_names=("gate_proj", "up_proj", "down_proj"),
            stacked_names=("gate_up_proj", "down_proj"),
        ),
        naming_spec=NamingSpec(
            layer_linear_names=(
                "q_proj",
                "k_proj",
                "o_proj",
                "out_proj",
                "v_proj_current",
                "v_proj_delayed",
                "gate_proj",
                "up_proj",
                "down_proj",
            ),
            is_tied=True,
        ),
    )
)
