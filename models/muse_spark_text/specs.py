"""Muse Spark, text only: latent experts behind a projection, norms that scale by weight + 1."""

from __future__ import annotations

from modelopt_lite.models.registry import register
from modelopt_lite.models.specs import ExpertStorageSpec, ExportSpec, ModelSpec, MoESpec, PTQSpec

# Measured on a built model, transformers 5.24.0. The text model alone has no output head on disk:
# planning needs the model. The norm inside of the experts' container stays as it is.
SPEC = register(
    ModelSpec(
        model_type="muse_spark_text",
        min_transformers_version="5.20",
        moe_spec=MoESpec(
            block_names=("MuseSparkMoE",),
            expert_linear_names=("gate_proj", "down_proj", "up_proj"),
            gate_up_pair=("gate_proj", "up_proj"),
        ),
        export_spec=ExportSpec(
            weight_plus_one_norm_names=(
                "MuseSparkTextCenteredRMSNorm",
                "MuseSparkTextInputScaledRMSNorm",
            )
        ),
        ptq_spec=PTQSpec(
            layer_names=("MuseSparkTextDecoderLayer",),
            router_names=("gate",),
            fused_linears=(("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")),
            norm_feeds=(
                (
                    "input_layernorm",
                    (
                        "self_attn.q_proj",
                        "self_attn.k_proj",
                        "self_attn.v_proj",
                        "self_attn.gate_proj",
                    ),
                ),
            ),
            keep_dtype_names=("e_score_correction_bias",),
        ),
        expert_storage_spec=ExpertStorageSpec(
            linear_names=("gate_proj", "up_proj", "down_proj"),
            stacked_names=("gate_up_proj", "down_proj"),
        ),
    )
)
