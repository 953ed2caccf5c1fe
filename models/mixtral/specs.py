"""Mixtral: every MLP a mixture of experts, named w1 (gate), w3 (up) and w2 (down) on disk.

The block is ``block_sparse_moe`` on disk and in transformers 4, ``mlp`` in transformers 5.
"""

from __future__ import annotations

from modelopt_lite.models.registry import register
from modelopt_lite.models.specs import (
    EPSpec,
    ExpertStorageSpec,
    ExportSpec,
    ModelSpec,
    MoESpec,
    NamingSpec,
    PTQSpec,
)

# Classes, module names, norms and who reads them: measured on built models, transformers 4.57.6,
# 5.14.1 and 5.24.0. Names on disk: files written by save_pretrained of the same releases.
# Expert parallelism: first release whose config class carries a plan (5.13.0).
# Grouped export: NVIDIA Model Optimizer 0.47.0, layer_utils.get_experts_list.
SPEC = register(
    ModelSpec(
        model_type="mixtral",
        min_transformers_version="4.57",
        moe_spec=MoESpec(
            block_names=("MixtralSparseMoeBlock",),
            expert_linear_names=("w1", "w2", "w3"),
            gate_up_pair=("w1", "w3"),
        ),
        export_spec=ExportSpec(grouped_expert_export=True),
        ep_spec=EPSpec(requires_transformers="5.13"),
        ptq_spec=PTQSpec(
            layer_names=("MixtralDecoderLayer",),
            router_names=("gate",),
            fused_linears=(("q_proj", "k_proj", "v_proj"), ("w1", "w3")),
            norm_feeds=(
                ("input_layernorm", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
                (
                    "post_attention_layernorm",
                    (
                        "block_sparse_moe.gate",
                        "block_sparse_moe.experts",
                        "mlp.gate",
                        "mlp.experts",
                    ),
                ),
            ),
        ),
        expert_storage_spec=ExpertStorageSpec(
            linear_names=("w1", "w3", "w2"),
            stacked_names=("gate_up_proj", "down_proj"),
        ),
        naming_spec=NamingSpec(
            layer_linear_names=("q_proj", "k_proj", "v_proj", "o_proj", "w1", "w2", "w3")
        ),
    )
)
