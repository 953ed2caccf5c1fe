"""LFM2: layers of short convolutions or attention, MLPs of w1 (gate), w3 (up), w2."""

from __future__ import annotations

from modelopt_lite.models.registry import register
from modelopt_lite.models.specs import ModelSpec, NamingSpec, PTQSpec

# Classes, module names, norms and who reads them: measured on built models, transformers 5.14.1 and
# 5.24.0. Names on disk: files written by save_pretrained of the same releases.
SPEC = register(
    ModelSpec(
        model_type="lfm2",
        min_transformers_version="4.57",
        ptq_spec=PTQSpec(
            layer_names=("Lfm2DecoderLayer",),
            fused_linears=(("q_proj", "k_proj", "v_proj"), ("w1", "w3")),
            norm_feeds=(
                ("operator_norm", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
                ("ffn_norm", ("feed_forward.w1", "feed_forward.w3")),
            ),
        ),
        naming_spec=NamingSpec(
            layer_linear_names=("q_proj", "k_proj", "v_proj", "out_proj", "w1", "w3", "w2"),
            is_tied=True,
        ),
    )
)
