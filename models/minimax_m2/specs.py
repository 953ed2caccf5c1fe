"""MiniMax-M2: GQA with norms on q and k, experts named w1 (gate), w3 (up), w2."""

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
        "minimax_m2",
        min_transformers_version="5.0",
        moe_spec={"block_names": ("MiniMaxM2SparseMoeBlock",)},
        export_spec=None,
        ptq_spec={"layer_names": ("MiniMaxM2DecoderLayer",)},
    )
)
