"""Gemma 3, text only: Gemma 2 with norms on q and k."""

from __future__ import annotations

from modelopt_lite.models.registry import register
from modelopt_lite.models.specs import GATED_LINEARS, ExportSpec, ModelSpec, NamingSpec, PTQSpec

# The norm scales by weight + 1: seen by running it with a weight of zeros, transformers 4.57.6,
# 5.14.1 and 5.24.0. The MLP reads pre_feedforward_layernorm; the two post norms feed the residual.
# Module names, norms and who reads them: measured on built models, transformers 4.57.6, 5.14.1
# and 5.24.0.
SPEC = register(
    ModelSpec(
        model_type="gemma3_text",
        min_transformers_version="4.57",
        export_spec=ExportSpec(weight_plus_one_norm_names=("Gemma3RMSNorm",)),
        ptq_spec=PTQSpec(
            layer_names=("Gemma3DecoderLayer",),
            fused_linears=(("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")),
            norm_feeds=(
                ("input_layernorm", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
                ("pre_feedforward_layernorm", ("mlp.gate_proj", "mlp.up_proj")),
            ),
        ),
        naming_spec=NamingSpec(
            layer_linear_names=GATED_LINEARS,
            is_tied=True,
        ),
    )
)
