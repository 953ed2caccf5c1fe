"""A.X K2: latent attention (MLA), dense first layers, then routed and shared experts."""

from __future__ import annotations

from modelopt_lite.models.deepseek_v32.specs import SPEC as DEEPSEEK_V32
from modelopt_lite.models.registry import register
from modelopt_lite.models.variants import variant

# Classes, module names, norms and who reads them: measured on built models, transformers 5.24.0.
# Names on disk: files written by save_pretrained of the same release.
# Most norms gate their own output (W_down, W_up), and a scale folded into one would change the
# gate: only the norm without a gate feeds others.
SPEC = register(
    variant(
        DEEPSEEK_V32,
        "axk2",
        min_transformers_version="5.15",
        moe_spec={"block_names": ("AXK2MoE",)},
        ep_spec=None,
        ptq_spec={
            "layer_names": ("AXK2DecoderLayer",),
            "skip_modules": (
                "*.indexer.wk",
                "*.indexer.weights_proj",
                "*norm.W_down",
                "*norm.W_up",
            ),
            "norm_feeds": (("self_attn.kv_a_layernorm", ("self_attn.kv_b_proj",)),),
        },
    )
)
