"""Step-3: experts stacked on disk in three tensors, a shared expert beside the block."""

from __future__ import annotations

from modelopt_lite.models.registry import register
from modelopt_lite.models.specs import ExpertStorageSpec, ModelSpec, MoESpec, PTQSpec

# The code comes with the checkpoint and was not seen. Names on disk and readers of norms: read in
# vLLM's step3_text.py, which loads these checkpoints: moe.gate_proj, up_proj and down_proj hold all
# experts, and q, k and v are joined. What its towers are called was not seen: no naming_spec.
SPEC = register(
    ModelSpec(
        model_type="step3_vl",
        modeling_source="remote_code",
        moe_spec=MoESpec(
            expert_linear_names=("gate_proj", "down_proj", "up_proj"),
            gate_up_pair=("gate_proj", "up_proj"),
        ),
        ptq_spec=PTQSpec(
            router_names=("gate",),
            skip_modules=("*vision_model*", "*vit_*"),
            fused_linears=(("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")),
            norm_feeds=(
                ("input_layernorm", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
                ("self_attn.inter_norm", ("self_attn.wq",)),
            ),
        ),
        expert_storage_spec=ExpertStorageSpec(
            linear_names=("gate_proj", "up_proj", "down_proj"),
            stacked_names=("gate_proj", "up_proj", "down_proj"),
            stacked_parent="",
        ),
    )
)
