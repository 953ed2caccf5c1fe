"""Inkling 2, text only: stacked experts, gate and up interleaved on disk."""

from __future__ import annotations

from modelopt_lite.models.registry import register
from modelopt_lite.models.specs import ExpertStorageSpec, ModelSpec, MoESpec, NamingSpec, PTQSpec

# Classes, module names, norms and who reads them: measured on built models, transformers 5.24.0.
# Names on disk: files written by save_pretrained of the same release.
SPEC = register(
    ModelSpec(
        model_type="inkling2_text",
        min_transformers_version="5.23",
        moe_spec=MoESpec(
            block_names=("Inkling2SparseMoeBlock",),
            expert_linear_names=("gate_proj", "down_proj", "up_proj"),
            gate_up_pair=("gate_proj", "up_proj"),
        ),
        ptq_spec=PTQSpec(
            layer_names=("Inkling2FullDecoderLayer", "Inkling2SlidingDecoderLayer"),
            router_names=("gate",),
            skip_modules=(
                "*.k_sconv",
                "*.scale",
                "*.proj",
                "*.v_sconv",
                "*.attn_sconv",
                "*.mlp_sconv",
                "*.static_w",
            ),
            fused_linears=(("gate_proj", "up_proj"),),
            norm_feeds=(
                (
                    "input_layernorm",
                    (
                        "self_attn.q_proj.linear",
                        "attn.wq_du",
                        "self_attn.k_proj.linear",
                        "attn.wk_dv",
                        "self_attn.v_proj.linear",
                        "attn.wv_dv",
                        "self_attn.relative_position_bias.linear",
                        "attn.wr_du",
                        "self_attn.sink_proj",
                        "attn.attn_sink_proj",
                        "self_attn.o_proj.gate_proj",
                        "attn.gate_attn",
                    ),
                ),
                (
                    "attn_norm",
                    (
                        "self_attn.q_proj.linear",
                        "attn.wq_du",
                        "self_attn.k_proj.linear",
                        "attn.wk_dv",
                        "self_attn.v_proj.linear",
                        "attn.wv_dv",
                        "self_attn.relative_position_bias.linear",
                        "attn.wr_du",
                        "self_attn.sink_proj",
                        "attn.attn_sink_proj",
                        "self_attn.o_proj.gate_proj",
                        "attn.gate_attn",
                    ),
                ),
                ("post_attention_layernorm", ("mlp.gate", "mlp.experts")),
                ("mlp_norm", ("mlp.gate", "mlp.experts")),
                (
                    "q_input_layernorm",
                    (
                        "self_attn.q_proj.linear",
                        "attn.wq_du",
                        "self_attn.relative_position_bias.linear",
                        "attn.wr_du",
                        "self_attn.sink_proj",
                        "attn.attn_sink_proj",
                        "self_attn.o_proj.gate_proj",
                        "attn.gate_attn",
                    ),
                ),
                (
                    "q_input_norm",
                    (
                        "self_attn.q_proj.linear",
                        "attn.wq_du",
                        "self_attn.relative_position_bias.linear",
                        "attn.wr_du",
                        "self_attn.sink_proj",
                        "attn.attn_sink_proj",
                        "self_attn.o_proj.gate_proj",
                        "attn.gate_attn",
                    ),
                ),
                (
                    "k_input_layernorm",
                    (
                        "self_attn.k_proj.linear",
                        "attn.wk_dv",
                        "self_attn.k_proj.sconv.weight_proj",
                        "attn.k_sconv.weight_proj",
                    ),
                ),
                (
                    "k_input_norm",
                    (
                        "self_attn.k_proj.linear",
                        "attn.wk_dv",
                        "self_attn.k_proj.sconv.weight_proj",
                        "attn.k_sconv.weight_proj",
                    ),
                ),
                (
                    "v_input_layernorm",
                    (
                        "self_attn.v_proj.linear",
                        "attn.wv_dv",
                        "self_attn.v_proj.sconv.weight_proj",
                        "attn.v_sconv.weight_proj",
                    ),
                ),
                (
                    "v_input_norm",
                    (
                        "self_attn.v_proj.linear",
                        "attn.wv_dv",
                        "self_attn.v_proj.sconv.weight_proj",
                        "attn.v_sconv.weight_proj",
                    ),
                ),
            ),
            # Loaded as bfloat16, these stay float32.
            keep_dtype_names=("query", "e_score_correction_bias"),
        ),
        expert_storage_spec=ExpertStorageSpec(
            linear_names=("gate_proj", "up_proj", "down_proj"),
            stacked_names=("gate_up_proj", "down_proj"),
        ),
        naming_spec=NamingSpec(
            layer_linear_names=(
                "attn_sink_proj",
                "gate_attn",
                "weight_proj",
                "wk_dv",
                "wo_ud",
                "wq_du",
                "wr_du",
                "wv_dv",
            ),
            layer_lists=("model.llm.layers",),
            embedding_names=("model.llm.embed",),
            head_names=("lm_head", "model.llm.unembed"),
        ),
    )
)
