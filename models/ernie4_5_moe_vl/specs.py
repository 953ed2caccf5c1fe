"""ERNIE 4.5 VL with its own code; in transformers it is ernie4_5_vl_moe."""

from __future__ import annotations

from modelopt_lite.models.ernie4_5_vl_moe.specs import SPEC as ERNIE4_5_VL_MOE
from modelopt_lite.models.registry import register
from modelopt_lite.models.variants import variant

# The code comes with the checkpoint and was not seen. Names on disk are those that transformers
# reads as ernie4_5_vl_moe. No classes are named, so blocks and layers are found by their
# structure, and no norm_feeds, so nothing is folded into norms.
SPEC = register(
    variant(
        ERNIE4_5_VL_MOE,
        "ernie4_5_moe_vl",
        min_transformers_version=None,
        modeling_source="remote_code",
        moe_spec={"block_names": ()},
        ep_spec=None,
        ptq_spec={"layer_names": (), "norm_feeds": ()},
    )
)
