"""FlexOlmo: norms after attention and experts, on their outputs."""

from __future__ import annotations

from modelopt_lite.models.qwen3_moe.specs import SPEC as QWEN3_MOE
from modelopt_lite.models.registry import register
from modelopt_lite.models.variants import variant

# Classes, module names, norms and who reads them: measured on built models, transformers 5.14.1 and
# 5.24.0. Names on disk: files written by save_pretrained of the same releases.
# Expert parallelism: first release whose config class carries a plan (5.13.0).
SPEC = register(
    variant(
        QWEN3_MOE,
        "flex_olmo",
        moe_spec={"block_names": ("FlexOlmoSparseMoeBlock",)},
        export_spec=None,
        ep_spec={"requires_transformers": "5.13"},
        ptq_spec={"layer_names": ("FlexOlmoDecoderLayer",), "norm_feeds": ()},
    )
)
