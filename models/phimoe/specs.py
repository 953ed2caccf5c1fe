"""Phi-3.5-MoE: LayerNorm with bias, experts named w1 (gate), w3 (up), w2."""

from __future__ import annotations

from modelopt_lite.models.mixtral.specs import SPEC as MIXTRAL
from modelopt_lite.models.registry import register
from modelopt_lite.models.variants import variant

# Classes, module names, norms and who reads them: measured on built models, transformers 5.14.1 and
# 5.24.0. Names on disk: files written by save_pretrained of the same releases.
# Expert parallelism: first release whose config class carries a plan (5.13.0).
SPEC = register(
    variant(
        MIXTRAL,
        "phimoe",
        moe_spec={"block_names": ("PhimoeSparseMoeBlock",)},
        export_spec=None,
        ptq_spec={
            "layer_names": ("PhimoeDecoderLayer",),
            "router_names": ("gate", "router"),
            "norm_feeds": (
                ("input_layernorm", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
                (
                    "post_attention_layernorm",
                    (
                        "block_sparse_moe.gate",
                        "mlp.router",
                        "mlp.experts",
                        "block_sparse_moe.experts",
                    ),
                ),
            ),
        },
    )
)
