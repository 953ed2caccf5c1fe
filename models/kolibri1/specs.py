"""Kolibri 1: routed and shared experts."""

from __future__ import annotations

from modelopt_lite.models.glm4_moe.specs import SPEC as GLM4_MOE
from modelopt_lite.models.registry import register
from modelopt_lite.models.variants import variant

# Classes, module names, norms and who reads them: measured on built models, transformers 5.24.0.
# Names on disk: files written by save_pretrained of the same release.
SPEC = register(
    variant(
        GLM4_MOE,
        "kolibri1",
        min_transformers_version="5.20",
        moe_spec={"block_names": ("Kolibri1SparseMoeBlock",)},
        ep_spec=None,
        ptq_spec={"layer_names": ("Kolibri1DecoderLayer",)},
    )
)
