"""Llama 1 to 3: GQA and a gated MLP."""

from __future__ import annotations

from modelopt_lite.models.registry import register
from modelopt_lite.models.specs import GATED_LINEARS, ExportSpec, ModelSpec, NamingSpec, PTQSpec

# Fuse rules: NVIDIA Model Optimizer 0.47.0, export. o_proj reads sums over tokens of v_proj's
# channels, down_proj reads up_proj's output times a gate: a scale of a channel passes through.
# With fewer v_proj rows than o_proj reads (GQA) the exporter skips the first rule.
# Module names, norms and who reads them: measured on built models, transformers 4.57.6, 5.14.1
# and 5.24.0.
SPEC = register(
    ModelSpec(
        model_type="llama",
        min_transformers_version="4.57",
        export_spec=ExportSpec(
            pqs_fuse_rules=(
                (("LlamaAttention",), "v_proj", "o_proj"),
                (("LlamaMLP",), "up_proj", "down_proj"),
            ),
        ),
        ptq_spec=PTQSpec(
            layer_names=("LlamaDecoderLayer",),
            fused_linears=(("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")),
            norm_feeds=(
                ("input_layernorm", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
                ("post_attention_layernorm", ("mlp.gate_proj", "mlp.up_proj")),
            ),
        ),
        naming_spec=NamingSpec(layer_linear_names=GATED_LINEARS),
    )
)
