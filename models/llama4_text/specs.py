"""Llama 4, text only: experts stacked input-major, a shared expert beside them."""

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
# Experts read the norm's output times the router's score: a scale of a channel passes through.
# llama4's experts stay stacked: vLLM (llama4.py) reads gate_up_proj and down_proj.
SPEC = register(
    ModelSpec(
        model_type="llama4_text",
        min_transformers_version="4.57",
        moe_spec=MoESpec(
            block_names=("Llama4TextMoe",),
            expert_linear_names=("gate_up_proj", "down_proj"),
            fused_expert_names=True,
        ),
        ep_spec=EPSpec(  # as transformers had it up to 5.22
            base_model_ep_plan={
                "layers.*.feed_forward.experts.gate_up_proj": "grouped_gemm",
                "layers.*.feed_forward.experts.down_proj": "grouped_gemm",
            }
        ),
        ptq_spec=PTQSpec(
            layer_names=("Llama4TextDecoderLayer",),
            router_names=("router",),
            fused_linears=(("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")),
            norm_feeds=(
                ("input_layernorm", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
                (
                    "post_attention_layernorm",
                    (
                        *("feed_forward.router", "feed_forward.experts"),
                        "feed_forward.shared_expert.gate_proj",
                        "feed_forward.shared_expert.up_proj",
                        *("feed_forward.gate_proj", "feed_forward.up_proj"),
                    ),
                ),
            ),
        ),
        expert_storage_spec=ExpertStorageSpec(
            stacked_names=("gate_up_proj", "down_proj"),
            input_major=True,
            export_stacked=True,
            shared_expert_names=("shared_expert",),
        ),
        naming_spec=NamingSpec(layer_linear_names=GATED_LINEARS),
    )
)
