"""LongCat-Flash with n-gram embeddings beside those of tokens."""

from __future__ import annotations

from modelopt_lite.models.longcat_flash.specs import SPEC as LONGCAT_FLASH
from modelopt_lite.models.registry import register
from modelopt_lite.models.variants import variant

# The code comes with the checkpoint and was not seen. Layers are taken to be those of LongCat-
# Flash, unchecked. No classes are named, so blocks and layers are found by their structure, and
# no norm_feeds, so nothing is folded into norms.
SPEC = register(
    variant(
        LONGCAT_FLASH,
        "longcat_flash_ngram",
        min_transformers_version=None,
        modeling_source="remote_code",
        moe_spec={"block_names": ()},
        ep_spec=None,
        ptq_spec={"layer_names": (), "norm_feeds": (), "skip_modules": ("*ngram*",)},
        naming_spec=None,
    )
)
