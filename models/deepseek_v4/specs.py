"""DeepSeek-V4: compressed and sparse attention, hyper-connections, experts w1, w3 and w2."""

from __future__ import annotations

from modelopt_lite.models.registry import register
from modelopt_lite.models.specs import ExpertStorageSpec, ModelSpec, MoESpec, NamingSpec, PTQSpec

# Who reads each norm, as modules are called in memory and on disk.
_READS_INPUT = (
    *("self_attn.q_a_proj", "attn.wq_a"),
    *("self_attn.kv_proj", "attn.wkv"),
    *("self_attn.compressor.kv_proj", "attn.compressor.wkv"),
    *("self_attn.compressor.gate_proj", "attn.compressor.wgate"),
    *("self_attn.compressor.indexer.kv_proj", "attn.indexer.compressor.wkv"),
    *("self_attn.compressor.indexer.gate_proj", "attn.indexer.compressor.wgate"),
    *("self_attn.compressor.indexer.scorer.weights_proj", "attn.indexer.weights_proj"),
)
_READS_Q = (
    *("self_attn.q_b_proj", "attn.wq_b"),
    *("self_attn.compressor.indexer.q_b_proj", "attn.indexer.wq_b"),
)
_READS_MLP = (
    *("mlp.gate", "ffn.gate"),
    *("mlp.experts", "ffn.experts"),
    *("mlp.shared_experts.gate_proj", "ffn.shared_experts.w1"),
    *("mlp.shared_experts.up_proj", "ffn.shared_experts.w3"),
)

# Classes, module names, norms and who reads them: measured on built models, transformers 5.14.1 and
# 5.24.0. Names on disk: files written by save_pretrained of the same releases.
# The second spelling of each name is that of files which transformers 5.24.0 writes.
SPEC = register(
    ModelSpec(
        model_type="deepseek_v4",
        min_transformers_version="5.8",
        moe_spec=MoESpec(
            block_names=("DeepseekV4SparseMoeBlock",),
            expert_linear_names=("w1", "w2", "w3"),
            gate_up_pair=("w1", "w3"),
        ),
        ptq_spec=PTQSpec(
            layer_names=("DeepseekV4DecoderLayer",),
            router_names=("gate",),
            # o_a_proj (wo_a) multiplies by groups and not as a linear layer. The others are left
            # as they are out of caution: whether engines quantize compressors and indexer was not
            # checked. Not so the indexer's q_b_proj: SGLang reads an excluded one as all of them.
            skip_modules=(
                *("*.o_a_proj", "*.wo_a", "*.indexer.kv_proj", "*.indexer.gate_proj"),
                *(f"*.compressor.{name}" for name in ("kv_proj", "gate_proj", "wkv", "wgate")),
                *("*.indexer.wk", "*.indexer.weights_proj", "*.scorer.weights_proj"),
                *("*hc_*", "*_hc.*", "*.tid2eid", "*.position_bias", "*.ape"),
            ),
            fused_linears=(
                ("q_a_proj", "kv_proj"),
                ("wq_a", "wkv"),
                ("gate_proj", "up_proj"),
                ("w1", "w3"),
            ),
            norm_feeds=(
                *((norm, _READS_INPUT) for norm in ("input_layernorm", "attn_norm")),
                *((norm, _READS_Q) for norm in ("self_attn.q_a_norm", "attn.q_norm")),
                *((norm, _READS_MLP) for norm in ("post_attention_layernorm", "ffn_norm")),
            ),
            # Loaded as bfloat16, these stay float32.
            keep_dtype_names=(
                *("hc_base", "hc_fn", "hc_scale", "base", "fn"),
                *("scale", "e_score_correction_bias", "position_bias", "sinks"),
            ),
        ),
        expert_storage_spec=ExpertStorageSpec(
            linear_names=("w1", "w3", "w2"),
            stacked_names=("gate_up_proj", "down_proj"),
            shared_expert_names=("shared_experts",),
        ),
        naming_spec=NamingSpec(
            layer_linear_names=(
                *("q_a_proj", "q_b_proj", "kv_proj", "o_b_proj", "wkv", "wo_b", "wq_a"),
                *("wq_b", "gate_proj", "up_proj", "w1", "w3", "w2", "down_proj"),
            ),
            head_names=("lm_head", "head"),
        ),
    )
)
