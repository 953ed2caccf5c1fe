"""HY4-VL, text only."""

from __future__ import annotations

from modelopt_lite.models.hy_v4_vl.specs import SPEC as HY_V4_VL
from modelopt_lite.models.registry import register
from modelopt_lite.models.variants import variant

# The text model alone: layers and classes are those of the root type. transformers has no class
# that predicts text from it, so that its files have no output head and, mostly, no prefix:
# planning needs the model.
SPEC = register(
    variant(
        HY_V4_VL,
        "hy_v4_vl_text",
        ep_spec=None,
        ptq_spec={"skip_modules": ("*hc_head*",)},
        naming_spec=None,
    )
)
