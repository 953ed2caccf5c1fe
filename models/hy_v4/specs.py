"""HY4: stacked experts on disk, routed and shared."""

from __future__ import annotations

from modelopt_lite.models.deepseek_v3.specs import READS_MLP
from modelopt_lite.models.deepseek_v32.specs import READS_INPUT
from modelopt_lite.models.deepseek_v32.specs import SPEC as DEEPSEEK_V32
from modelopt_lite.models.registry import register
from modelopt_lite.models.specs import LATENT_LINEARS
from modelopt_lite.models.variants import variant

# Classes, module names, norms and who reads them: measured on built models, transformers 5.24.0.
# Names on disk: files written by save_pretrained of the same release.
SPEC = register(
    variant(
        DEEPSEEK_V32,
        "hy_v4",
        min_transformers_version="5.17",
        moe_spec={"block_names": ("HYV4MoE",)},
        ep_spec=None,
        ptq_spec={
            "layer_names": ("HYV4DecoderLayer",),
            # vLLM joins wk and weights_proj of the indexer in bfloat16 (deepseek_v2.py).
            "skip_modules": (
                *("*.indexer.wk", "*.indexer.weights_proj", "*.hc_fn", "*.hc_head_fn"),
            ),
            "norm_feeds": (
                (
                    "input_layernorm",
                    (*READS_INPUT, "self_attn.gate_proj", "self_attn.linear_gate"),
                ),
                ("self_attn.q_a_layernorm", ("self_attn.q_b_proj", "self_attn.indexer.wq_b")),
                ("self_attn.kv_a_layernorm", ("self_attn.kv_b_proj",)),
                (
                    "post_attention_layernorm",
                    (*READS_MLP, "mlp.linear_gate", "mlp.shared_experts.linear_gate"),
                ),
            ),
            # Loaded as bfloat16, these stay float32.
            "keep_dtype_names": (
                *("hc_base", "hc_fn", "hc_scale", "base", "fn", "scale"),
                *("e_score_correction_bias", "bias", "sinks"),
            ),
        },
        naming_spec={
            "layer_linear_names": (*LATENT_LINEARS, "linear_gate", "wq_b", "up_proj", "down_proj")
        },
    )
)
