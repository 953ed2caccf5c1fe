"""Diffusion Gemma: an encoder and a decoder of Gemma 4 layers that share their weights."""

from __future__ import annotations

from modelopt_lite.models.registry import register
from modelopt_lite.models.specs import (
    EPSpec,
    ExpertStorageSpec,
    ModelSpec,
    MoESpec,
    PTQSpec,
)

# Classes, module names, norms and who reads them: measured on built models, transformers 5.24.0.
# Names on disk: files written by save_pretrained of the same release.
# No norm_feeds: encoder and decoder share their weights, and folds could not be
# proven. No naming_spec: names of both were not told apart.
SPEC = register(
    ModelSpec(
        model_type="diffusion_gemma",
        min_transformers_version="5.11",
        moe_spec=MoESpec(
            block_names=("DiffusionGemmaDecoderTextLayer", "DiffusionGemmaEncoderTextLayer"),
            expert_linear_names=("gate_proj", "down_proj", "up_proj"),
            gate_up_pair=("gate_proj", "up_proj"),
        ),
        ep_spec=EPSpec(plan_config_attr="text_config"),
        ptq_spec=PTQSpec(
            layer_names=("DiffusionGemmaDecoderTextLayer",),
            router_names=("router",),
            skip_modules=("*vision_tower*", "*embed_vision*", "*self_conditioning*"),
            fused_linears=(("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")),
        ),
        expert_storage_spec=ExpertStorageSpec(
            linear_names=("gate_proj", "up_proj", "down_proj"),
            stacked_names=("gate_up_proj", "down_proj"),
        ),
    )
)
