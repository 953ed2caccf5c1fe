"""Nemotron (dense): squared ReLU without a gate, LayerNorm with bias scaling by weight + 1."""

from __future__ import annotations

from modelopt_lite.models.registry import register
from modelopt_lite.models.specs import ExportSpec, ModelSpec, NamingSpec, PTQSpec

# The norm scales by weight + 1: seen by running it with a weight of zeros, transformers 4.57.6,
# 5.14.1 and 5.24.0. LayerNorm1P is its name outside transformers.
# Module names, norms and who reads them: measured on built models, transformers 4.57.6, 5.14.1
# and 5.24.0.
SPEC = register(
    ModelSpec(
        model_type="nemotron",
        min_transformers_version="4.57",
        export_spec=ExportSpec(
            weight_plus_one_norm_names=("NemotronLayerNorm1P", "LayerNorm1P"),
        ),
        ptq_spec=PTQSpec(
            layer_names=("NemotronDecoderLayer",),
            fused_linears=(("q_proj", "k_proj", "v_proj"),),
            norm_feeds=(
                ("input_layernorm", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
                ("post_attention_layernorm", ("mlp.up_proj",)),
            ),
        ),
        naming_spec=NamingSpec(
            layer_linear_names=("q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj")
        ),
    )
)
