"""Qwen4 (experimental), text only: delta nets and indexed attention, routed and shared experts."""

from __future__ import annotations

from modelopt_lite.models.qwen3_5_moe_text.specs import LAYER_LINEARS
from modelopt_lite.models.qwen3_5_moe_text.specs import SPEC as QWEN3_5_MOE_TEXT
from modelopt_lite.models.registry import register
from modelopt_lite.models.variants import variant

# Classes, module names, norms and who reads them: measured on built models, transformers 5.24.0.
# Names on disk: files written by save_pretrained of the same release.
# No norm_feeds: attention and MLP read what the hyper-connections mixed, not a norm.
SPEC = register(
    variant(
        QWEN3_5_MOE_TEXT,
        "qwen4_exp_text",
        min_transformers_version="5.16",
        moe_spec={"block_names": ("Qwen4ExpTextSparseMoeBlock",)},
        export_spec={"weight_plus_one_norm_names": ("Qwen4ExpTextRMSNorm",)},
        ep_spec=None,
        ptq_spec={
            "layer_names": ("Qwen4ExpTextDecoderLayer",),
            "skip_modules": ("*hyper_connection*", "*.conv1d"),
            "norm_feeds": (),
        },
        naming_spec={"layer_linear_names": (*LAYER_LINEARS, "index_qk_proj")},
    )
)
