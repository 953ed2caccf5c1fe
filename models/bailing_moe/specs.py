"""Ling and Ring 1 (Bailing MoE): q, k and v in one matrix, routed and shared experts."""

from __future__ import annotations

from modelopt_lite.models.glm4_moe.specs import SPEC as GLM4_MOE
from modelopt_lite.models.registry import register
from modelopt_lite.models.variants import variant

# The code comes with the checkpoint and was not seen. Names and readers of norms: read in vLLM's
# bailing_moe.py, which loads these checkpoints. Its own class names may be others, so none are
# given: blocks and layers are found by their structure.
SPEC = register(
    variant(
        GLM4_MOE,
        "bailing_moe",
        min_transformers_version=None,
        modeling_source="remote_code",
        moe_spec={"block_names": ()},
        ep_spec=None,
        ptq_spec={
            "layer_names": (),
            "skip_modules": (),
            "fused_linears": (("gate_proj", "up_proj"),),
            "norm_feeds": (
                ("input_layernorm", ("attention.query_key_value",)),
                (
                    "post_attention_layernorm",
                    (
                        "mlp.gate",
                        "mlp.experts",
                        "mlp.shared_experts.gate_proj",
                        "mlp.shared_experts.up_proj",
                    ),
                ),
            ),
            "keep_dtype_names": (),
            "key_value_names": ("query_key_value", "query_key_value"),
        },
        naming_spec={
            "layer_linear_names": ("query_key_value", "dense", "gate_proj", "up_proj", "down_proj"),
            "embedding_names": ("model.word_embeddings",),
        },
    )
)
