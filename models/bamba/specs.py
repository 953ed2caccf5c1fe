"""Bamba: layers of Mamba-2 or attention."""

from __future__ import annotations

from modelopt_lite.models.registry import register
from modelopt_lite.models.specs import (
    GATED_LINEARS,
    ModelSpec,
    NamingSpec,
    PTQSpec,
)

# Classes, module names, norms and who reads them: measured on built models, transformers 5.14.1 and
# 5.24.0. Names on disk: files written by save_pretrained of the same releases.
SPEC = register(
    ModelSpec(
        model_type="bamba",
        min_transformers_version="4.57",
        ptq_spec=PTQSpec(
            layer_names=("BambaDecoderLayer",),
            skip_modules=("*.conv1d",),
            fused_linears=(("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")),
            norm_feeds=(
                (
                    "input_layernorm",
                    ("mamba.in_proj", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
                ),
                ("mamba.norm", ("mamba.out_proj",)),
                ("pre_ff_layernorm", ("feed_forward.gate_proj", "feed_forward.up_proj")),
            ),
        ),
        naming_spec=NamingSpec(layer_linear_names=(*GATED_LINEARS, "out_proj", "in_proj")),
    )
)
