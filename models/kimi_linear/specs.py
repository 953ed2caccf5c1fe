"""Kimi Linear: delta attention and latent attention, experts as Mixtral's (w1, w3 and w2)."""

from __future__ import annotations

from modelopt_lite.models.mixtral.specs import SPEC as MIXTRAL
from modelopt_lite.models.registry import register
from modelopt_lite.models.specs import GATED_LINEARS
from modelopt_lite.models.variants import variant

_READS_INPUT = (
    *("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.kv_a_proj_with_mqa"),
    *("self_attn.forget_gate.f_a_proj", "self_attn.f_a_proj"),  # in memory and on disk
    *("self_attn.b_proj", "self_attn.g_a_proj"),
)
_MLP = ("gate_proj", "up_proj", "gate", "experts")
_SHARED = ("shared_experts.gate_proj", "shared_experts.up_proj")
_READS_MLP = tuple(  # in memory and on disk
    f"{block}.{reader}" for block in ("mlp", "block_sparse_moe") for reader in (*_MLP, *_SHARED)
)

# Classes, module names, norms and who reads them: measured on built models, transformers 5.24.0.
# Names on disk: files written by save_pretrained of the same release.
SPEC = register(
    variant(
        MIXTRAL,
        "kimi_linear",
        min_transformers_version="5.17",
        moe_spec={"block_names": ("KimiLinearMoE",)},
        export_spec=None,
        ep_spec=None,
        ptq_spec={
            "layer_names": ("KimiLinearDecoderLayer",),
            "skip_modules": ("*_conv1d", "*.A_log"),
            "fused_linears": (
                *(("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("w1", "w3")),
            ),
            "norm_feeds": (
                ("input_layernorm", _READS_INPUT),
                ("post_attention_layernorm", _READS_MLP),
                ("self_attn.kv_a_layernorm", ("self_attn.kv_b_proj",)),
            ),
            # Loaded as bfloat16, these stay float32.
            "keep_dtype_names": ("e_score_correction_bias", "dt_bias"),
        },
        expert_storage_spec={"shared_expert_names": ("shared_experts",)},
        naming_spec={
            "layer_linear_names": (
                *GATED_LINEARS,
                *("kv_a_proj_with_mqa", "kv_b_proj", "b_proj", "f_a_proj", "f_b_proj"),
                *("g_a_proj", "g_b_proj", "w1", "w3", "w2"),
            )
        },
    )
)
