"""Mistral Large 4: latent attention, experts as Mixtral's, behind a vision tower."""

from __future__ import annotations

from modelopt_lite.models.mixtral.specs import SPEC as MIXTRAL
from modelopt_lite.models.registry import register
from modelopt_lite.models.specs import EPSpec
from modelopt_lite.models.variants import variant

# Who reads each norm, as modules are called in memory and on disk.
_ATTENTIONS = ("self_attn", "attention")
_KV_NORMS = ("self_attn.kv_a_layernorm", "attention.kv_a_norm")
_READS_KV = ("self_attn.kv_b_proj", "attention.wkv_b")
_READS_Q = ("self_attn.indexer.wq_b", "attention.indexer.wq_b")
_READS_MLP = (
    *("mlp.gate_proj", "feed_forward.w1", "mlp.up_proj", "feed_forward.w3"),
    *("mlp.gate", "gate", "mlp.experts", "experts"),
    *("mlp.shared_experts.gate_proj", "shared_experts.w1"),
    *("mlp.shared_experts.up_proj", "shared_experts.w3"),
)

# Classes, module names, norms and who reads them: measured on built models, transformers 5.24.0.
# Names on disk: files written by save_pretrained of the same release.
# input_layernorm is left out: a fold into it changed the output.
SPEC = register(
    variant(
        MIXTRAL,
        "mistral_large4",
        min_transformers_version="5.22",
        moe_spec={"block_names": ("MistralLarge4TextMoE",)},
        export_spec=None,
        ep_spec=EPSpec(plan_config_attr="text_config"),
        ptq_spec={
            "layer_names": ("MistralLarge4TextDecoderLayer",),
            "skip_modules": (
                *("*multi_modal_projector*", "*vision_tower*", "*patch_merger*"),
                *("*vision_encoder*", "*vision_language_adapter*"),
            ),
            "fused_linears": (("gate_proj", "up_proj"), ("w1", "w3")),
            "norm_feeds": (
                *((norm, _READS_KV) for norm in _KV_NORMS),
                *((f"{attention}.indexer.q_input_norm", _READS_Q) for attention in _ATTENTIONS),
                *((norm, _READS_MLP) for norm in ("post_attention_layernorm", "ffn_norm")),
            ),
            # Loaded as bfloat16, these stay float32.
            "keep_dtype_names": ("alpha",),
        },
        expert_storage_spec={"shared_expert_names": ("shared_experts",)},
        naming_spec={
            "layer_linear_names": (
                *("weights_proj", "wk", "wkv_a_with_mqa", "wkv_b", "wo"),
                *("wq", "wq_b", "w1", "w3", "w2"),
            ),
            "layer_lists": ("layers",),
            "embedding_names": ("tok_embeddings",),
            "head_names": ("lm_head", "output"),
        },
    )
)
