"""JetMoE: experts in attention and MLP, each kind in two stacked tensors."""

from __future__ import annotations

from modelopt_lite.models.registry import register
from modelopt_lite.models.specs import EPSpec, ExpertStorageSpec, ModelSpec, MoESpec, PTQSpec

# Classes, names and who reads the norms: built models, transformers 5.14.1 and 5.24.0. The experts
# of attention stay as they are. The norms feed experts, which no fold reaches here: no norm_feeds.
SPEC = register(
    ModelSpec(
        model_type="jetmoe",
        min_transformers_version="4.57",
        moe_spec=MoESpec(
            block_names=("JetMoeMoE",),
            expert_linear_names=("gate_proj", "down_proj", "up_proj"),
            gate_up_pair=("gate_proj", "up_proj"),
        ),
        ep_spec=EPSpec(
            unsupported="its attention has experts too, and transformers has no plan for either"
        ),
        ptq_spec=PTQSpec(
            layer_names=("JetMoeDecoderLayer", "JetMoeBlock"),  # the second up to 4.57
            router_names=("router",),
            skip_modules=("*.self_attention.experts.*",),
            fused_linears=(("gate_proj", "up_proj"),),
            key_value_names=("kv_proj", "kv_proj"),
        ),
        expert_storage_spec=ExpertStorageSpec(
            linear_names=("gate_proj", "up_proj", "down_proj"),
            stacked_names=("input_linear", "output_linear"),
            stacked_parent="",
        ),
    )
)
