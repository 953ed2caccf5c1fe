"""Snowflake Arctic: layers with experts have a dense residual MLP beside them."""

from __future__ import annotations

from modelopt_lite.models.registry import register
from modelopt_lite.models.specs import ExpertStorageSpec, ModelSpec, MoESpec, NamingSpec, PTQSpec

# The code comes with the checkpoint and was not seen. Names of experts and readers of norms: read
# in vLLM's arctic.py, which loads these checkpoints. Class names are vLLM's, unchecked against the
# checkpoint's own, so none are given: blocks and layers are found by their structure.
SPEC = register(
    ModelSpec(
        model_type="arctic",
        modeling_source="remote_code",
        moe_spec=MoESpec(expert_linear_names=("w1", "w2", "w3"), gate_up_pair=("w1", "w3")),
        ptq_spec=PTQSpec(
            router_names=("gate",),
            fused_linears=(("q_proj", "k_proj", "v_proj"), ("w1", "w3")),
            norm_feeds=(
                ("input_layernorm", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
                ("residual_layernorm", ("residual_mlp.w1", "residual_mlp.w3")),
                # Layers without experts hold an MLP in the block.
                (
                    "post_attention_layernorm",
                    (
                        "block_sparse_moe.gate",
                        "block_sparse_moe.experts",
                        "block_sparse_moe.mlp.w1",
                        "block_sparse_moe.mlp.w3",
                    ),
                ),
            ),
        ),
        expert_storage_spec=ExpertStorageSpec(linear_names=("w1", "w3", "w2")),
        naming_spec=NamingSpec(
            layer_linear_names=("q_proj", "k_proj", "v_proj", "o_proj", "w1", "w2", "w3")
        ),
    )
)
