"""Inkling with its vision and audio towers."""

from __future__ import annotations

from modelopt_lite.models.inkling_text.specs import SPEC as INKLING_TEXT
from modelopt_lite.models.registry import register
from modelopt_lite.models.specs import EPSpec
from modelopt_lite.models.variants import variant

# Who reads the attention norm, as modules are called in memory and on disk.
_READS_INPUT = (
    *("self_attn.q_proj", "attn.wq_du"),
    *("self_attn.k_proj", "attn.wk_dv"),
    *("self_attn.v_proj", "attn.wv_dv"),
    *("self_attn.r_proj", "attn.wr_du"),
)

# Classes, module names, norms and who reads them: measured on built models, transformers 5.14.1.
# Names on disk: files written by save_pretrained of the same release.
# The norm before the experts feeds shared experts that no fold reaches.
SPEC = register(
    variant(
        INKLING_TEXT,
        "inkling_mm_model",
        ep_spec=EPSpec(plan_config_attr="text_config"),
        ptq_spec={
            "skip_modules": (
                *("*vision_tower*", "*audio*", "*visual*", "*.proj"),
                *("*.k_sconv", "*.v_sconv", "*.attn_sconv", "*.mlp_sconv"),
                *("*.shared_w13_weight", "*.shared_w2_weight"),
            ),
            "norm_feeds": tuple((norm, _READS_INPUT) for norm in ("input_layernorm", "attn_norm")),
            "keep_dtype_names": (),
        },
        expert_storage_spec={
            "stacked_names": ("w13_weight", "w2_weight"),
            "interleaved_gate_up": True,  # on disk; transformers puts gate before up as it loads
            "shared_expert_names": (),
        },
        naming_spec={
            "layer_linear_names": ("wk_dv", "wo_ud", "wq_du", "wr_du", "wv_dv"),
            "layer_lists": ("model.llm.layers",),
            "embedding_names": ("model.llm.embed",),
            "head_names": ("lm_head", "model.llm.unembed"),
        },
    )
)
