"""Nemotron-H and Nemotron 3: each layer is one of Mamba-2, attention, MLP or mixture of experts.

Experts have no gate. The layers are ``backbone.layers.*`` on disk, ``model.layers.*`` in memory.
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

_READS_NORM = (
    *("mixer.in_proj", "mixer.q_proj", "mixer.k_proj", "mixer.v_proj"),
    *("mixer.up_proj", "mixer.gate", "mixer.shared_experts.up_proj"),
    # With moe_latent_size the experts read fc1_latent_proj, and are narrower.
    *("mixer.fc1_latent_proj", "mixer.experts"),
)

# Classes, module names, norms and who reads them: measured on built models, transformers 5.14.1 and
# 5.24.0. Names on disk: files written by save_pretrained of the same releases.
# Expert parallelism: first release whose config class carries a plan (5.21.0).
# Grouped export: NVIDIA Model Optimizer 0.47.0, layer_utils.get_experts_list.
SPEC = register(
    ModelSpec(
        model_type="nemotron_h",
        min_transformers_version="5.3",
        moe_spec=MoESpec(
            block_names=("NemotronHMoE",),
            expert_linear_names=("up_proj", "down_proj"),
        ),
        export_spec=ExportSpec(grouped_expert_export=True),
        ep_spec=EPSpec(requires_transformers="5.21"),
        ptq_spec=PTQSpec(
            layer_names=("NemotronHBlock",),
            router_names=("gate",),
            # mtp: _keys_to_ignore_on_load_unexpected, transformers 5.14.1.
            skip_modules=("*.conv1d", "mtp.*"),
            fused_linears=(("q_proj", "k_proj", "v_proj"),),
            norm_feeds=(("norm", _READS_NORM), ("mixer.norm", ("mixer.out_proj",))),
            # Measured by loading in bfloat16, 5.14.1 and 5.24.0: A_log, D and dt_bias are cast.
            keep_dtype_names=("e_score_correction_bias",),
        ),
        expert_storage_spec=ExpertStorageSpec(
            linear_names=("up_proj", "down_proj"),
            stacked_names=("up_proj", "down_proj"),
            shared_expert_names=("shared_experts",),
        ),
        naming_spec=NamingSpec(
            layer_linear_names=(
                *("q_proj", "k_proj", "v_proj", "o_proj", "in_proj", "out_proj"),
                *("up_proj", "down_proj", "fc1_latent_proj", "fc2_latent_proj"),
            ),
            layer_lists=("backbone.layers",),
            embedding_names=("backbone.embedding", "backbone.embeddings"),
            layer_count_keys=("num_hidden_layers", "layers_block_type"),
        ),
    )
)
