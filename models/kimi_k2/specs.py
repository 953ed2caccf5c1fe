"""Kimi K2: said to be DeepSeek-V3 with more experts and fewer heads."""

from __future__ import annotations

from modelopt_lite.models.deepseek_v3.specs import SPEC as DEEPSEEK_V3
from modelopt_lite.models.registry import register
from modelopt_lite.models.variants import variant

# The code comes with the checkpoint and was not seen. Names on disk are taken to be those of
# DeepSeek-V3, unchecked. No classes are named, so blocks and layers are found by their structure,
# and no norm_feeds, so nothing is folded into norms.
SPEC = register(
    variant(
        DEEPSEEK_V3,
        "kimi_k2",
        min_transformers_version=None,
        modeling_source="remote_code",
        moe_spec={"block_names": ()},
        ep_spec=None,
        ptq_spec={"layer_names": (), "norm_feeds": ()},
    )
)
