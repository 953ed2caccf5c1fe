"""GPTSAN-japanese: a prefix language model with experts of two linears, gone since 5.0."""

from __future__ import annotations

from modelopt_lite.models.registry import register
from modelopt_lite.models.specs import EPSpec, ExpertStorageSpec, ModelSpec, MoESpec, PTQSpec

# Classes and names: a built model, transformers 4.57.6; release 5.0 no longer has them. Norms stand
# behind what they normalize: they feed no linear.
SPEC = register(
    ModelSpec(
        model_type="gptsan-japanese",
        min_transformers_version="4.57",
        removed_in_transformers="5.0",
        moe_spec=MoESpec(
            block_names=("GPTSanJapaneseSparseMLP",), expert_linear_names=("wi", "wo")
        ),
        ep_spec=EPSpec(unsupported="transformers has it up to 4.57 only, and no plan for it"),
        ptq_spec=PTQSpec(
            layer_names=("GPTSanJapaneseBlock",),
            router_names=("router",),
            skip_modules=("*final_logits_bias*", "*last_project*", "*spout*"),
            fused_linears=(("q_proj", "k_proj", "v_proj"),),
        ),
        expert_storage_spec=ExpertStorageSpec(linear_names=("wi", "wo")),
    )
)
