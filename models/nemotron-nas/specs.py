"""Llama-Nemotron (DeciLM): Llama whose layers may lack attention or MLP, or have narrower ones."""

from __future__ import annotations

from modelopt_lite.models.llama.specs import SPEC as LLAMA
from modelopt_lite.models.registry import register
from modelopt_lite.models.variants import variant

# The code comes with the checkpoint and was not seen. Modules and readers of norms: read in vLLM's
# nemotron_nas.py, which loads these checkpoints and calls the layer's class so. Layers differ in
# shapes, so names alone do not tell: no naming_spec.
SPEC = register(
    variant(
        LLAMA,
        "nemotron-nas",
        min_transformers_version=None,
        modeling_source="remote_code",
        export_spec=None,
        ptq_spec={"layer_names": ("DeciLMDecoderLayer",)},
        naming_spec=None,
    )
)
