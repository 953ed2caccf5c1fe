"""MiniMax-M1 with its own code; taken to be built as MiniMax-Text-01."""

from __future__ import annotations

from modelopt_lite.models.minimax.specs import SPEC as MINIMAX
from modelopt_lite.models.registry import register
from modelopt_lite.models.variants import variant

# The code comes with the checkpoint and was not seen. Names on disk are taken to be those of
# minimax, unchecked. No classes are named, so blocks and layers are found by their structure, and
# no norm_feeds, so nothing is folded into norms.
SPEC = register(
    variant(
        MINIMAX,
        "minimax_m1",
        min_transformers_version=None,
        modeling_source="remote_code",
        moe_spec={"block_names": ()},
        ep_spec=None,
        ptq_spec={"layer_names": (), "norm_feeds": ()},
    )
)
