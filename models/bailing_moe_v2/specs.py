"""Ling and Ring 2 (Bailing MoE V2): taken to have the names of Bailing MoE."""

from __future__ import annotations

from modelopt_lite.models.bailing_moe.specs import SPEC as BAILING_MOE
from modelopt_lite.models.registry import register
from modelopt_lite.models.variants import variant

# The code comes with the checkpoint and was not seen. Names on disk are taken to be those of
# bailing_moe, unchecked. No classes are named, so blocks and layers are found by their structure,
# and no norm_feeds, so nothing is folded into norms.
SPEC = register(
    variant(
        BAILING_MOE,
        "bailing_moe_v2",
        min_transformers_version=None,
        modeling_source="remote_code",
        moe_spec={"block_names": ()},
        ep_spec=None,
        ptq_spec={"layer_names": (), "norm_feeds": (), "skip_modules": ("*.eh_proj",)},
    )
)
