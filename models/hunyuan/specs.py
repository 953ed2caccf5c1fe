"""Hunyuan-Large with its own code; taken to be built as hunyuan_v1_moe."""

from __future__ import annotations

from modelopt_lite.models.hunyuan_v1_moe.specs import SPEC as HUNYUAN_V1_MOE
from modelopt_lite.models.registry import register
from modelopt_lite.models.variants import variant

# The code comes with the checkpoint and was not seen. Names on disk are taken to be those of
# hunyuan_v1_moe, unchecked. No classes are named, so blocks and layers are found by their
# structure, and no norm_feeds, so nothing is folded into norms.
SPEC = register(
    variant(
        HUNYUAN_V1_MOE,
        "hunyuan",
        min_transformers_version=None,
        modeling_source="remote_code",
        moe_spec={"block_names": ()},
        ep_spec=None,
        ptq_spec={"layer_names": (), "norm_feeds": ()},
    )
)
