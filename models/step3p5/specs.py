"""Step 3.5: the text model of Step 3.7."""

from __future__ import annotations

from modelopt_lite.models.registry import register
from modelopt_lite.models.step3p7.specs import SPEC as STEP3P7
from modelopt_lite.models.variants import variant

# The text model alone: layers and classes are those of the root type. transformers has no class
# that predicts text from it, so that its files have no output head and, mostly, no prefix:
# planning needs the model. Its stacks are named as in memory.
SPEC = register(
    variant(
        STEP3P7,
        "step3p5",
        ep_spec=None,
        ptq_spec={"router_names": ("gate",), "skip_modules": ()},
        expert_storage_spec={
            "container": "experts",
            "stacked_names": ("gate_up_proj", "down_proj"),
            "export_stacked": False,
        },
        naming_spec=None,
    )
)
