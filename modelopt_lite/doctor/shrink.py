"""The smallest instance of an architecture that its config class allows.

A config class gives every size a default, that of a model of billions of parameters. Here each size
is made small by what its name says it is: the keys of configs are few and repeat over all
architectures. Everything else keeps its default, so that the model has every kind of layer that the
default one has.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# A size in units, by the name of its key; the first pattern that is the whole key holds. Widths of
# different things differ, so that a shape tells which it is; what must be equal or a product (heads
# times head width is the hidden width, the keys of Mamba) is.
_WIDTHS: tuple[tuple[str, int], ...] = (
    (r"(.*_)?shared_(expert_)?intermediate_size", 10),
    (r"(moe|expert)_(intermediate_size|ffn_hidden_size)|expert_ffn_hidden_size", 6),
    (r"(.*_)?(intermediate_size|ffn_dim|ffn_hidden_size|mlp_dim|d_ff)(_mlp)?", 12),
    (r"mamba_(d_ssm|intermediate)", 16),
    (r"merged_hidden_size|downsample_hidden_size", 32),
    (r"(.*_)?hidden_size|d_model|embed_dim|n_embd|decoder_dim|hidden_dim", 8),
    (
        r"(vision_)?output_dim|projector_(in|out)put_dim|(.*_)?adapter_(in_dim|out_dim|input_size)|downsample_channels|output_channels",
        8,
    ),
    (r"qk_head_dim", 4),
    (r"(.*_)?v_head_dim", 3),
    (r"(q|o)_lora_rank|router_hidden_size|laurel_rank|moe_latent_size", 4),
    (r"kv_lora_rank", 5),
    (r"(.*_)?(head_dim|head_size|kv_channels|d_kv|d_head)|rotary_dim", 2),
    (r"(mamba_)?(d_state|ssm_state_size|state_size)|time_step_rank|mamba_dt_rank", 2),
    (r"d_rel|hidden_size_per_layer_input|audio_embed_dim", 2),
    (r"(.*_)?vocab_size(_.*)?|codebook_size|vocab_offset", 20),
)

# A count, by the name of its key: never more than this.
_COUNTS: tuple[tuple[str, int], ...] = (
    (r"(moe_)?num_(local_)?experts|n_routed_experts|(num_)?routed_experts|moe_num_experts", 4),
    (r"(zero_expert_num|n_zero_experts)", 2),
    (
        r"num_experts_per_tok(en)?|moe_top_?k|moe_k|top_k_experts|experts_per_token",
        2,
    ),
    (r"(n|num)_shared_experts?|moe_num_shared_experts", 1),
    (
        r"(n|num)_groups?|num_expert_group|o_groups|mamba_(n|num)_groups|num_code_groups|num_quantizers",
        2,
    ),
    (r"(num_)?(moe_)?topk_groups?|first_k_dense_replace|num_dense_layers|moe_layer_start_index", 1),
    (r"mamba_(n|num)_heads", 8),
    (r"indexer_kv_heads", 1),
    (r"linear_num_key_heads", 2),
    (r"linear_num_value_heads", 4),
    (r"(.*_)?(num_(global_)?key_value|kv_n|num_kv|kv)_heads", 2),
    (r"(.*_)?(num_attention|attention|num|n|index_n)_heads?", 4),
    (r"depth|encoder_layers|decoder_layers|num_sparse_(en|de)coder_layers", 2),
    (r"num_nextn_predict_layers|num_mtp_layers|mtp_num_layers", 0),
    (r"(global_attn_every_n_layers|full_attention_interval|(attn|expert)_layer_period)", 2),
    (r"(attn|expert)_layer_offset|num_kv_shared_layers", 1),
    (r"sliding_window_pattern|no_rope_layer_interval|(encoder_|decoder_)?sparse_step", 2),
    (r"sliding_window|max_position_embeddings|max_seq_len|n_positions|max_source_positions", 256),
    (r"num_position_embeddings|index_topk", 64),
    (r"index_topk_blocks", 2),
    (r"indexer_budget", 512),
    (r"indexer_compress_ratio|clip_qkv", 4),
    (r"pos_emb_(height|width|time)", 4),
    (r"num_mel_bins", 16),
)

_LAYER_COUNT = re.compile(r"(.*_)?num_hidden_layers|n_layers?|num_layers|num_decoder_layers")
_TOKENS = re.compile(r".*token_(id|index)|codec_.*_id|.*_token_ids?")
_MOST_LAYERS = 8


# Fields that some classes leave at None although their models cannot be built without.
_NEEDED = re.compile(
    r"sliding_window|(moe_)?num_(local_)?experts|n_routed_experts|num_experts_per_tok|moe_topk|top_k_experts|"
    r"(n|num)_shared_experts|num_(global_)?key_value_heads|head_dim|moe_intermediate_size|"
    r"shared_expert_intermediate_size|indexer_.*|ngram_vocab_size_base|clip_qkv|eos_token_id"
)

_MISSING: dict[str, int | float] = {"rope_theta": 10000.0, "spatial_merge_size": 2}
_EXPERTS = re.compile(r"(moe_)?num_(local_)?experts|n_routed_experts|moe_topk|num_experts_per_tok")
_TWO_FORMS = re.compile(r"q_lora_rank|moe_latent_size")
_MOE_SWITCH = re.compile(r"is_moe|enable_moe(_block)?|use_moe")


@dataclass(frozen=True, slots=True)
class Sizes:
    """How small, and what to give beyond the defaults.

    Attributes:
        unit: Every width is a multiple of it.
        fill: Give a value to sizes whose default is None, and switch experts on.
        other: Take the other form where there are two: the first layer dense, latent queries where
            they are none and none where they are.
    """

    unit: int = 8
    fill: bool = False
    other: bool = False


def shrink(config: Any, sizes: Sizes) -> dict[str, Any]:
    """Return the keyword arguments that make a small config of the class of ``config``.

    Args:
        config: One with the defaults of its class, or that of a checkpoint.
        sizes: How small.
    """
    values = {k: v for k, v in vars(config).items() if not k.startswith("_")}
    small: dict[str, Any] = {}
    for key, value in values.items():
        if hasattr(value, "model_type") and hasattr(value, "to_dict"):
            # What the config around it set differs from the class's own defaults.
            changed = value.to_diff_dict().items()
            own = {k: v for k, v in changed if isinstance(v, bool | int | float | str)}
            own.pop("transformers_version", None)
            small[key] = {**own, "model_type": value.model_type, **shrink(value, sizes)}
        elif value == 1 and value is not True and sizes.fill and _EXPERTS.fullmatch(key):
            small[key] = _number(key, 1 << 20, sizes)
        elif isinstance(value, int) and not isinstance(value, bool):
            made = _number(key, value, sizes)
            if made != value:
                small[key] = made
        elif isinstance(value, list | tuple) and key in ("hidden_sizes", "depths"):
            small[key] = [min(v, 8 * sizes.unit if key == "hidden_sizes" else 1) for v in value]
        elif value is None and sizes.fill and _NEEDED.fullmatch(key):
            small[key] = _number(key, 1 << 20, sizes)
        elif value is None and sizes.fill and key in ("layer_types", "mlp_layer_types"):
            small[key] = _kinds(key, values)
        elif isinstance(value, bool) and _MOE_SWITCH.fullmatch(key) and sizes.fill:
            small[key] = True
    if sizes.other:
        _take_other_form(values, small, sizes)
    _relate(values, small)
    _layers(values, small)
    _images(values, small)
    _rotary(values, small, sizes)
    return small


def missing_value(key: str, sizes: Sizes) -> int | float | None:
    """Return a value for a field that a class reads and has no default for; None if unknown."""
    if key in _MISSING:
        return _MISSING[key]
    value = _number(key, 1 << 20, sizes)
    return value if value < 1 << 20 else None


def _kinds(key: str, values: Mapping[str, Any]) -> list[str]:
    """A layer of each kind, by the fields that there are, where the class lists none."""
    if key == "mlp_layer_types":
        return ["dense", "sparse"]
    if any(name.startswith("mamba_") for name in values):
        return ["mamba", "attention"]
    convolves = any(name.startswith("conv_") for name in values)
    return ["conv" if convolves else "full_attention", "full_attention"]


def _number(key: str, value: int, sizes: Sizes) -> int:
    """Return the small value of a size or a count, by the name of its key."""
    if _TOKENS.fullmatch(key):
        return value % 100 if value >= 100 else value
    for pattern, count in _COUNTS:
        if re.fullmatch(pattern, key):
            return min(value, count)
    for pattern, units in _WIDTHS:
        if re.fullmatch(pattern, key):
            return min(value, units * sizes.unit)
    return value


def _take_other_form(values: Mapping[str, Any], small: dict[str, Any], sizes: Sizes) -> None:
    for key, value in values.items():
        if _TWO_FORMS.fullmatch(key):
            small[key] = _number(key, 1 << 20, sizes) if value is None else None
        elif key == "mlp_only_layers":
            small[key] = [0]


def _relate(values: Mapping[str, Any], small: dict[str, Any]) -> None:
    """Keep equal what was equal, and products that classes insist on."""
    for key, other in (("num_key_value_heads", "num_attention_heads"), ("head_dim", "qk_head_dim")):
        same = values.get(key) == values.get(other) is not None
        filled = values.get(key) is None and key in small
        if (same or filled) and other in small:
            small[key] = small[other]
    if "state_size" in values and "num_heads" in small:
        width = small.get("hidden_size", 0) * values.get("expand", 1)
        small["num_heads"] = width // small.get("head_dim", width)


def _layers(values: Mapping[str, Any], small: dict[str, Any]) -> None:
    """Keep one layer of each kind, where lists tell the kinds, or else the first few."""
    counts = [k for k, v in values.items() if _LAYER_COUNT.fullmatch(k) and isinstance(v, int)]
    if not counts:
        return
    count = values[counts[0]]
    lists = {
        key: value
        for key, value in values.items()
        if isinstance(value, list | tuple) and len(value) == count > 1
        if key not in counts and key not in small
    }
    kinds: dict[tuple[Any, ...], int] = {}
    for position, kind in enumerate(zip(*lists.values(), strict=True)):
        kinds.setdefault(tuple(map(repr, kind)), position)
    chosen = list(kinds.values())[:_MOST_LAYERS]
    chosen += chosen[-1:] * (2 - len(chosen))
    number = min(max(2, len(chosen)), count)
    small.update(dict.fromkeys(counts, number))
    for key, value in lists.items():
        small[key] = [value[position] for position in chosen[:number]]


def _images(values: Mapping[str, Any], small: dict[str, Any]) -> None:
    """Let an image be four patches."""
    if isinstance(values.get("patch_size"), int) and isinstance(values.get("image_size"), int):
        small["image_size"] = 2 * values["patch_size"]


def _rotary(values: Mapping[str, Any], small: dict[str, Any], sizes: Sizes) -> None:
    """Split the rotated half of a head between time, height and width in the former proportions."""
    for key in ("rope_parameters", "rope_scaling"):
        rope = values.get(key)
        if rope is None and key == "rope_scaling" and key in values and sizes.fill:
            rope = {"rope_type": "default"}  # read by some models of 4.57, and None by default
        if not isinstance(rope, dict):
            continue
        sections = rope.get("mrope_section")
        if sections is None and sizes.fill:
            sections = [22, 22, 20]  # read by some models, and given by no default
        if isinstance(sections, list | tuple):
            head = small.get("head_dim") or values.get("head_dim") or 2 * sizes.unit
            half = int(head * rope.get("partial_rotary_factor", 1.0)) // 2
            small[key] = {**rope, "mrope_section": _sections(list(sections), half)}


def _sections(before: list[int], half: int) -> list[int]:
    """Three numbers that sum to ``half``, equal where they were equal."""
    common = max(before, key=before.count)
    odd = next((i for i, v in enumerate(before) if v != common), 0)
    part = max(1, half // 3)
    made = [part] * len(before)
    made[odd] = half - part * (len(before) - 1)
    return made
