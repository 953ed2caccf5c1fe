"""Switch Transformers: an encoder-decoder with experts of two linears."""

from __future__ import annotations

from modelopt_lite.models.registry import register
from modelopt_lite.models.specs import EPSpec, ExpertStorageSpec, ModelSpec, MoESpec, PTQSpec

# Classes and names of experts: built models, transformers 4.57.6 to 5.24.0. An encoder-decoder:
# every run is refused when the model is built.
SPEC = register(
    ModelSpec(
        model_type="switch_transformers",
        min_transformers_version="4.57",
        moe_spec=MoESpec(
            block_names=("SwitchTransformersSparseMLP",), expert_linear_names=("wi", "wo")
        ),
        ep_spec=EPSpec(
            unsupported="an encoder-decoder, which only generates: it cannot be calibrated"
        ),
        ptq_spec=PTQSpec(layer_names=("SwitchTransformersBlock",), router_names=("router",)),
        expert_storage_spec=ExpertStorageSpec(linear_names=("wi", "wo")),
    )
)
