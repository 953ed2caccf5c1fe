"""Which engine loads which format in which dialect, and by which rule it refuses one.

Read from vLLM 0.32.0 (``quantization/modelopt.py``, ``compressed_tensors/schemes``), SGLang 0.5.23
(``modelopt_quant.py``, ``model_config.py``), TensorRT-LLM (``quantization/modelopt_config.py``,
``_torch/modules/linear.py``) and transformers 5.14.1 (``quantizers/auto.py``); the last is also
run: see docs/clients.md. What none of these says is not known, and does not count as loading.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from modelopt_lite.dialects.compressed_tensors import CompressedTensors
from modelopt_lite.dialects.modelopt import ModelOpt, algo_name
from modelopt_lite.formats import nvfp4
from modelopt_lite.formats.linear import FORMATS, LinearFormat

ENGINES = ("vLLM", "SGLang", "TensorRT-LLM", "transformers")
Answer = Literal["loads", "refused", "unknown"]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What an engine does with a format, and why where it does not load it."""

    answer: Answer
    rule: str = ""


_LOADS = Verdict("loads")
_UNKNOWN = Verdict("unknown", "not stated by its source, not run")
_FP8 = ("fp8", "fp8_per_channel_per_token", "fp8_2d_blockwise_weight_only")
_NVFP4 = ("nvfp4", "w4a16_nvfp4")
_FOUR_OVER_SIX = "nvfp4_four_over_six"  # to readers NVFP4; its scale of the whole is another number
_LOADED: Mapping[tuple[str, str], tuple[str, ...]] = {
    (ModelOpt.name, "vLLM"): (*_FP8, *_NVFP4, _FOUR_OVER_SIX, "mxfp8"),
    (ModelOpt.name, "SGLang"): ("fp8", *_NVFP4, _FOUR_OVER_SIX, "mxfp8"),
    (ModelOpt.name, "TensorRT-LLM"): (
        "fp8",
        "fp8_2d_blockwise_weight_only",
        "int8",
        "int8_weight_only",
        "int4_weight_only",
        "nvfp4",
        _FOUR_OVER_SIX,
        "w4a8_nvfp4_fp8",
        "w4a8_mxfp4_fp8",
        "w4a8_mxfp4_fp8_dynamic",
    ),
    (CompressedTensors.name, "vLLM"): (
        *_FP8,
        *_NVFP4,
        "int8",
        "int8_per_channel_per_token",
        "int8_weight_only",
        "int4_weight_only",
        "mxfp8",
    ),
    (CompressedTensors.name, "transformers"): tuple(FORMATS),
}
# Other sizes of groups that an engine's kernels have.
_GROUPS: Mapping[tuple[str, str], tuple[int, ...]] = {
    (CompressedTensors.name, "vLLM"): (32, 64),
    (CompressedTensors.name, "transformers"): tuple(2**n for n in range(3, 11)),
}
# The rule by which an engine refuses all formats of a dialect that are not listed above.
_REFUSING: Mapping[tuple[str, str], str] = {
    (ModelOpt.name, "vLLM"): "quant_method modelopt knows no quant_algo {algo}",
    (ModelOpt.name, "SGLang"): "no method belongs to quant_algo {algo}",
    (ModelOpt.name, "transformers"): "no quantizer belongs to quant_method modelopt",
}
# The reader that joins experts, and what it can join.
_JOINING = (CompressedTensors.name, "transformers")
_JOINED = ("int4_weight_only", "int8_weight_only")
# Seen in vLLM 0.32.0: "Unsupported FusedMoe scheme", where inputs are not scaled at run time.
_STATIC_EXPERTS = (CompressedTensors.name, "vLLM", "int8")
# Where the name of a format is known and its blocks are not.
_BLOCKS = "blocks of NVFP4 have 16 elements, not {block}"
# What one engine takes by this name; whether it applies the scales was not examined.
_WITH_SCALES = ((ModelOpt.name, "SGLang"), "NVFP4_AWQ")


def verdict(
    engine: str,
    dialect: str,
    fmt: LinearFormat,
    *,
    experts: bool = False,
    beside: str = "",
) -> Verdict:
    """Return what an engine does with a format in a dialect.

    Args:
        engine: One of ``ENGINES``.
        dialect: Name of the dialect.
        fmt: The format.
        experts: The model has experts in that format, not only linear layers.
        beside: What stands beside matrices in the modelopt dialect: ``scale`` (of the channels of
            inputs), ``factors`` (with such a scale), or nothing.
    """
    plain = _plain(engine, dialect, fmt, experts)
    if not beside or dialect != ModelOpt.name or plain.answer != "loads":
        return plain
    algo, rule = algo_name(fmt, beside), _REFUSING.get((dialect, engine))
    if rule and algo != fmt.quant_algo and ((dialect, engine), algo) != _WITH_SCALES:
        return Verdict("refused", rule.format(algo=algo))
    return Verdict("unknown", f"whether it applies the {beside} beside a matrix is not known")


def _plain(engine: str, dialect: str, fmt: LinearFormat, experts: bool) -> Verdict:
    """What an engine does where nothing stands beside a matrix."""
    if experts and (dialect, engine) == _JOINING and fmt.family not in _JOINED:
        return Verdict("refused", "transformers 5 joins experts, and decompresses words alone")
    if experts and (dialect, engine, fmt.name) == _STATIC_EXPERTS:
        return Verdict(
            "refused", "experts in INT8 need scales of inputs that are found as they run"
        )
    listed = fmt.family in _LOADED.get((dialect, engine), ())
    if listed and (fmt.name == fmt.family or fmt.group_size in _GROUPS.get((dialect, engine), ())):
        return _LOADS
    if listed:
        return Verdict("unknown", f"groups of {fmt.group_size} were not tried")
    if (rule := _REFUSING.get((dialect, engine))) is None:
        return _UNKNOWN
    known = {FORMATS[name].quant_algo for name in _NVFP4}
    if "{algo}" in rule and fmt.quant_algo in known and fmt.group_size != nvfp4.BLOCK:
        rule = _BLOCKS
    return Verdict("refused", rule.format(algo=fmt.quant_algo, block=fmt.group_size))


def loading(dialect: str, fmt: LinearFormat, beside: str = "") -> list[str]:
    """Return the engines that are known to load a format in a dialect."""
    return [e for e in ENGINES if verdict(e, dialect, fmt, beside=beside).answer == "loads"]
