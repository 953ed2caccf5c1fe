"""Inkling 2, text only: stacked experts, gate and up interleaved on disk."""

from __future__ import annotations

from modelopt_lite.models.inkling_mm_model.specs import SPEC as INKLING_MM_MODEL
from modelopt_lite.models.registry import register
from modelopt_lite.models.variants import variant

# Who reads an attention norm, as modules are called in memory and on disk.
_Q = (
    *("self_attn.q_proj.linear", "attn.wq_du"),
    *("self_attn.relative_position_bias.linear", "attn.wr_du"),
    *("self_attn.sink_proj", "attn.attn_sink_proj"),
    *("self_attn.o_proj.gate_proj", "attn.gate_attn"),
)
_K = ("self_attn.k_proj.linear", "attn.wk_dv")
_V = ("self_attn.v_proj.linear", "attn.wv_dv")
_K_CONV = ("self_attn.k_proj.sconv.weight_proj", "attn.k_sconv.weight_proj")
_V_CONV = ("self_attn.v_proj.sconv.weight_proj", "attn.v_sconv.weight_proj")

# Convolutions, what makes their weights, scales, and the queries of attention to earlier layers.
SKIP = (
    *("*.weight_proj", "*.k_sconv", "*.v_sconv", "*.attn_sconv", "*.mlp_sconv"),
    *("*.scale", "*.proj", "*.static_w", "*attn_res*"),
)

# Classes, module names, norms and who reads them: measured on built models, transformers 5.24.0.
# Names on disk: files written by save_pretrained of the same release.
SPEC = register(
    variant(
        INKLING_MM_MODEL,
        "inkling2_text",
        min_transformers_version="5.23",
        moe_spec={"block_names": ("Inkling2SparseMoeBlock",)},
        ep_spec=None,
        ptq_spec={
            "layer_names": ("Inkling2FullDecoderLayer", "Inkling2SlidingDecoderLayer"),
            "skip_modules": SKIP,
            "fused_linears": (("gate_proj", "up_proj"),),
            "norm_feeds": (
                *((norm, (*_Q, *_K, *_V)) for norm in ("input_layernorm", "attn_norm")),
                *((norm, _Q) for norm in ("q_input_layernorm", "q_input_norm")),
                *((norm, (*_K, *_K_CONV)) for norm in ("k_input_layernorm", "k_input_norm")),
                *((norm, (*_V, *_V_CONV)) for norm in ("v_input_layernorm", "v_input_norm")),
                ("post_attention_layernorm", ("mlp.gate", "mlp.experts")),
                ("mlp_norm", ("mlp.gate", "mlp.experts")),
            ),
            # Loaded as bfloat16, these stay float32.
            "keep_dtype_names": ("query", "e_score_correction_bias"),
        },
        naming_spec={
            "layer_linear_names": (
                *("wq_du", "wk_dv", "wv_dv", "wr_du", "wo_ud"),
                *("attn_sink_proj", "gate_attn"),
            )
        },
    )
)
