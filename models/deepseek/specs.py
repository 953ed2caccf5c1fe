"""DeepSeek-MoE: grouped or plain attention, routed and shared experts."""

from __future__ import annotations

from modelopt_lite.models.glm4_moe.specs import SPEC as GLM4_MOE
from modelopt_lite.models.registry import register
from modelopt_lite.models.variants import variant

# The code comes with the checkpoint and was not seen. Names on disk are taken to be those of
# GLM-4.5, which has the same parts, unchecked. No classes are named, so blocks and layers are
# found by their structure, and no norm_feeds, so nothing is folded into norms.
SPEC = register(
    variant(
        GLM4_MOE,
        "deepseek",
        min_transformers_version=None,
        modeling_source="remote_code",
        moe_spec={"block_names": ()},
        ep_spec=None,
        ptq_spec={"layer_names": (), "norm_feeds": (), "skip_modules": (), "keep_dtype_names": ()},
    )
)
