"""gpt-oss (20b, 120b): attention with sinks, experts stacked input-major, gate and up interleaved.

Published checkpoints hold the experts as MXFP4 blocks; unpacked they have the layout below.
"""

from __future__ import annotations

from modelopt_lite.models.registry import register
from modelopt_lite.models.specs import ExpertStorageSpec, ModelSpec, MoESpec, NamingSpec, PTQSpec

# Classes, module names, norms and who reads them: measured on built models, transformers 4.57.6,
# 5.14.1 and 5.24.0. Names on disk: files written by save_pretrained of the same releases.
# Gate order: measured by running the experts' own gate function, transformers 5.24.0.
# No EPSpec: transformers has a plan since 5.3, before expert parallelism needs it.
SPEC = register(
    ModelSpec(
        model_type="gpt_oss",
        min_transformers_version="4.57",
        moe_spec=MoESpec(
            # GptOssMoE is the block's name outside transformers.
            block_names=("GptOssMLP", "GptOssMoE"),
            expert_linear_names=("gate_up_proj", "down_proj"),
            fused_expert_names=True,
        ),
        ptq_spec=PTQSpec(
            layer_names=("GptOssDecoderLayer",),
            router_names=("router",),
            fused_linears=(("q_proj", "k_proj", "v_proj"),),
            norm_feeds=(
                ("input_layernorm", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
                ("post_attention_layernorm", ("mlp.router", "mlp.experts")),
            ),
        ),
        expert_storage_spec=ExpertStorageSpec(
            stacked_names=("gate_up_proj", "down_proj"),
            input_major=True,
            interleaved_gate_up=True,
            export_stacked=True,
        ),
        naming_spec=NamingSpec(layer_linear_names=("q_proj", "k_proj", "v_proj", "o_proj")),
    )
)
