"""Youtu: latent attention (MLA), dense."""

from __future__ import annotations

from modelopt_lite.models.registry import register
from modelopt_lite.models.specs import ModelSpec, NamingSpec, PTQSpec

# Classes, module names, norms and who reads them: measured on built models, transformers 5.14.1 and
# 5.24.0. Names on disk: files written by save_pretrained of the same releases.
SPEC = register(
    ModelSpec(
        model_type="youtu",
        min_transformers_version="5.1",
        ptq_spec=PTQSpec(
            layer_names=("YoutuDecoderLayer",),
            fused_linears=(("gate_proj", "up_proj"), ("q_a_proj", "kv_a_proj_with_mqa")),
            norm_feeds=(
                ("input_layernorm", ("self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa")),
                ("self_attn.q_a_layernorm", ("self_attn.q_b_proj",)),
                ("self_attn.kv_a_layernorm", ("self_attn.kv_b_proj",)),
                ("post_attention_layernorm", ("mlp.gate_proj", "mlp.up_proj")),
            ),
        ),
        naming_spec=NamingSpec(
            layer_linear_names=(
                "q_a_proj",
                "q_b_proj",
                "kv_a_proj_with_mqa",
                "kv_b_proj",
                "o_proj",
                "gate_proj",
                "up_proj",
                "down_proj",
            ),
            is_tied=True,
        ),
    )
)
