"""Granite 4 hybrid: layers of Mamba-2 or attention, stacked experts beside a shared MLP."""

from __future__ import annotations

from modelopt_lite.models.granitemoe.specs import SPEC as GRANITEMOE
from modelopt_lite.models.registry import register
from modelopt_lite.models.variants import variant

# Classes, module names, norms and who reads them: measured on built models, transformers 5.14.1 and
# 5.24.0. Names on disk: files written by save_pretrained of the same releases.
# Expert parallelism: first release whose config class carries a plan (5.21.0).
SPEC = register(
    variant(
        GRANITEMOE,
        "granitemoehybrid",
        moe_spec={"block_names": ("GraniteMoeHybridMoE",)},
        ptq_spec={
            "layer_names": ("GraniteMoeHybridDecoderLayer",),
            "skip_modules": ("*.conv1d",),
            "norm_feeds": (
                (
                    "input_layernorm",
                    ("mamba.in_proj", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
                ),
                ("mamba.norm", ("mamba.out_proj",)),
                (
                    "post_attention_layernorm",
                    (
                        "shared_mlp.input_linear",
                        "block_sparse_moe.router",
                        "block_sparse_moe.experts",
                    ),
                ),
            ),
        },
        naming_spec={
            "layer_linear_names": (
                *("q_proj", "k_proj", "v_proj", "o_proj"),
                *("out_proj", "in_proj", "input_linear", "output_linear"),
            )
        },
    )
)
