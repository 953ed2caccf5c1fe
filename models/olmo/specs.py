"""OLMo: LayerNorm without weights."""

from __future__ import annotations

from modelopt_lite.models.olmo2.specs import SPEC as OLMO2
from modelopt_lite.models.registry import register
from modelopt_lite.models.variants import variant

# Classes, module names, norms and who reads them: measured on built models, transformers 5.14.1 and
# 5.24.0. Names on disk: files written by save_pretrained of the same releases.
SPEC = register(
    variant(
        OLMO2,
        "olmo",
        ptq_spec={"layer_names": ("OlmoDecoderLayer",)},
    )
)
