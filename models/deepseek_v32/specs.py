"""DeepSeek-V3.2: DeepSeek-V3 whose attention picks its tokens by an indexer."""

from __future__ import annotations

from modelopt_lite.models.deepseek_v3.specs import READS_MLP
from modelopt_lite.models.deepseek_v3.specs import SPEC as DEEPSEEK_V3
from modelopt_lite.models.registry import register
from modelopt_lite.models.specs import LATENT_LINEARS
from modelopt_lite.models.variants import variant

READS_INPUT = (
    *("self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa"),
    *("self_attn.indexer.wk", "self_attn.indexer.weights_proj"),
)

# Classes, module names, norms and who reads them: measured on built models, transformers 5.14.1 and
# 5.24.0. Names on disk: files written by save_pretrained of the same releases.
# Expert parallelism: first release whose config class carries a plan (5.13.0).
SPEC = register(
    variant(
        DEEPSEEK_V3,
        "deepseek_v32",
        min_transformers_version="5.11",
        moe_spec={"block_names": ("DeepseekV32MoE",)},
        ptq_spec={
            "layer_names": ("DeepseekV32DecoderLayer",),
            # vLLM joins wk and weights_proj of the indexer in bfloat16 (deepseek_v2.py).
            # The others as in deepseek_v3.
            "skip_modules": (
                *("*.indexer.wk", "*.indexer.weights_proj"),
                *("*.eh_proj", "*.shared_head.*"),
            ),
            "norm_feeds": (
                ("input_layernorm", READS_INPUT),
                ("self_attn.q_a_layernorm", ("self_attn.q_b_proj", "self_attn.indexer.wq_b")),
                ("self_attn.kv_a_layernorm", ("self_attn.kv_b_proj",)),
                ("post_attention_layernorm", READS_MLP),
            ),
        },
        naming_spec={
            "layer_linear_names": (*LATENT_LINEARS, "wq_b", "gate_proj", "up_proj", "down_proj")
        },
    )
)
