"""GPTSAN-japanese: a prefix language model with experts of two linears, gone since 5.0."""

from __future__ import annotations

from modelopt_lite.models.registry import register
from modelopt_lite.models.specs import EPSpec, ExpertStorageSpec, ModelSpec, MoESpec, PTQSpec

# Classes and names of experts: a built model, transformers 4.57.6; release 5.0 no longer has them.
SPEC = register(
    ModelSpec(
        model_type="gptsan-japanese",
        min_transformers_version="4.57",
        moe_spec=MoESpec(
            block_names=("GPTSanJapaneseSparseMLP",), expert_linear_names=("wi", "wo")
        ),
        ep_spec=EPSpec(unsupported="transformers has it up to 4.57 only, and no plan for it"),
        ptq_spec=PTQSpec(layer_names=("GPTSanJapaneseBlock",), router_names=("router",)),
        expert_storage_spec=ExpertStorageSpec(linear_names=("wi", "wo")),
    )
)
