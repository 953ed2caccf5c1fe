"""LFM2 with experts named w1 (gate), w3 (up), w2."""

from __future__ import annotations

from modelopt_lite.models.lfm2.specs import SPEC as LFM2
from modelopt_lite.models.registry import register
from modelopt_lite.models.specs import EPSpec, ExpertStorageSpec, MoESpec
from modelopt_lite.models.variants import variant

# Classes, module names, norms and who reads them: measured on built models, transformers 5.14.1 and
# 5.24.0. Names on disk: files written by save_pretrained of the same releases.
# Expert parallelism: first release whose config class carries a plan (5.13.0).
SPEC = register(
    variant(
        LFM2,
        "lfm2_moe",
        min_transformers_version="5.0",
        moe_spec=MoESpec(
            block_names=("Lfm2MoeSparseMoeBlock",),
            expert_linear_names=("w1", "w2", "w3"),
            gate_up_pair=("w1", "w3"),
        ),
        ep_spec=EPSpec(requires_transformers="5.13"),
        ptq_spec={
            "layer_names": ("Lfm2MoeDecoderLayer",),
            "router_names": ("gate",),
            "skip_modules": ("*.conv",),
            "norm_feeds": (
                (
                    "operator_norm",
                    ("conv.in_proj", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
                ),
                (
                    "ffn_norm",
                    (
                        *("feed_forward.w1", "feed_forward.w3"),
                        *("feed_forward.gate", "feed_forward.experts"),
                    ),
                ),
            ),
            # Loaded as bfloat16, these stay float32.
            "keep_dtype_names": ("expert_bias",),
        },
        expert_storage_spec=ExpertStorageSpec(
            linear_names=("w1", "w3", "w2"),
            stacked_names=("gate_up_proj", "down_proj"),
        ),
        naming_spec={
            "layer_linear_names": (
                *("q_proj", "k_proj", "v_proj", "out_proj"),
                *("in_proj", "w1", "w3", "w2"),
            )
        },
    )
)
