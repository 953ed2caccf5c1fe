"""GLM-5-Next, text only: latent attention with an indexer, routed and shared experts."""

from __future__ import annotations

from modelopt_lite.models.deepseek_v32.specs import SPEC as DEEPSEEK_V32
from modelopt_lite.models.registry import register
from modelopt_lite.models.specs import GATED_LINEARS, LATENT_LINEARS
from modelopt_lite.models.variants import variant

# Classes, module names, norms and who reads them: measured on built models, transformers 5.24.0.
# Names on disk: files written by save_pretrained of the same release. The readers of norms are
# those of deepseek_v32.
SPEC = register(
    variant(
        DEEPSEEK_V32,
        "glm5_next_text",
        min_transformers_version="5.16",
        moe_spec={"block_names": ("Glm5NextTextMoE",)},
        ep_spec=None,
        ptq_spec={
            "layer_names": ("Glm5NextTextDecoderLayer",),
            # vLLM joins wk and weights_proj of the indexer in bfloat16 (deepseek_v2.py).
            "skip_modules": (
                *("*.indexer.wk", "*.indexer.weights_proj"),
                *("*.hc_*", "*_conv1d", "*.index_kpool_compress_*"),
            ),
            "fused_linears": (
                ("q_proj", "k_proj", "v_proj"),
                ("gate_proj", "up_proj"),
                ("q_a_proj", "kv_a_proj_with_mqa"),
            ),
            # Loaded as bfloat16, these stay float32.
            "keep_dtype_names": ("base", "scale", "e_score_correction_bias", "A_log", "dt_bias"),
        },
        naming_spec={
            "layer_linear_names": (
                *(*GATED_LINEARS, *LATENT_LINEARS[:-1], "wq_b"),
                *("b_proj", "f_a_proj", "f_b_proj", "g_a_proj", "g_b_proj"),
            ),
            "layer_lists": ("model.layers", "layers"),
            "embedding_names": ("embed_tokens",),
            "head_names": (),
        },
    )
)
