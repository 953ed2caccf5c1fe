"""DBRX: attention and experts beside LayerNorms, all experts of a layer in three flat matrices."""

from __future__ import annotations

from modelopt_lite.models.registry import register
from modelopt_lite.models.specs import (
    EPSpec,
    ExpertStorageSpec,
    ModelSpec,
    MoESpec,
    NamingSpec,
    PTQSpec,
)

# Classes and names: a built model, transformers 5.14.1, where the class has no forward pass with
# small sizes; the norm's reader was seen in the part that ran. w1, v1 and w2 are [E * I, H], two
# axes for three: they are left as they are.
SPEC = register(
    ModelSpec(
        model_type="dbrx",
        min_transformers_version="4.57",
        moe_spec=MoESpec(
            block_names=("DbrxFFN",),
            expert_linear_names=("w1", "v1", "w2"),
            fused_expert_names=True,
        ),
        ep_spec=EPSpec(
            unsupported="its experts lie in flat matrices, which no rank can hold a share of"
        ),
        ptq_spec=PTQSpec(
            layer_names=("DbrxBlock",),
            router_names=("router",),
            skip_modules=("*.experts.mlp.*",),
            norm_feeds=(("norm_attn_norm.norm_1", ("norm_attn_norm.attn.Wqkv",)),),
            key_value_names=("Wqkv", "Wqkv"),
        ),
        expert_storage_spec=ExpertStorageSpec(
            container="experts.mlp", stacked_names=("w1", "v1", "w2"), export_stacked=True
        ),
        naming_spec=NamingSpec(
            layer_linear_names=("Wqkv", "out_proj"),
            layer_lists=("transformer.blocks",),
            embedding_names=("transformer.wte",),
            layer_count_keys=("n_layers",),
        ),
    )
)
