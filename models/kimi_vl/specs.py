"""Kimi-VL: a text model like DeepSeek-V3 behind a vision tower."""

from __future__ import annotations

from modelopt_lite.models.deepseek_v3.specs import SPEC as DEEPSEEK_V3
from modelopt_lite.models.registry import register
from modelopt_lite.models.variants import variant

# The code comes with the checkpoint and was not seen. Names are unchecked. No classes are named,
# so blocks and layers are found by their structure, and no norm_feeds, so nothing is folded into
# norms.
SPEC = register(
    variant(
        DEEPSEEK_V3,
        "kimi_vl",
        min_transformers_version=None,
        modeling_source="remote_code",
        moe_spec={"block_names": ()},
        ep_spec=None,
        ptq_spec={
            "layer_names": (),
            "norm_feeds": (),
            "skip_modules": ("*vision_tower*", "*multi_modal_projector*"),
        },
        naming_spec=None,
    )
)
