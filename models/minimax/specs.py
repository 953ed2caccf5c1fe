"""MiniMax-01 and M1: lightning or softmax attention, experts named w1 (gate), w3 (up), w2."""

from __future__ import annotations

from modelopt_lite.models.mixtral.specs import SPEC as MIXTRAL
from modelopt_lite.models.registry import register
from modelopt_lite.models.variants import variant

# Classes, module names, norms and who reads them: measured on built models, transformers 5.14.1 and
# 5.24.0. Names on disk: files written by save_pretrained of the same releases.
# Expert parallelism: first release whose config class carries a plan (5.13.0).
# No norm_feeds: the residual is taken after each norm, so a scale folded into one would reach it.
SPEC = register(
    variant(
        MIXTRAL,
        "minimax",
        moe_spec={"block_names": ("MiniMaxSparseMoeBlock",)},
        export_spec=None,
        ptq_spec={
            "layer_names": ("MiniMaxDecoderLayer",),
            "skip_modules": ("*.diagonal_decay", "*.key_decay", "*.query_decay", "*.slope_rate"),
            "norm_feeds": (),
        },
        naming_spec={
            "layer_linear_names": (
                "qkv_proj",
                "q_proj",
                "k_proj",
                "v_proj",
                "o_proj",
                "out_proj",
                "output_gate",
                "w1",
                "w3",
                "w2",
            )
        },
    )
)
