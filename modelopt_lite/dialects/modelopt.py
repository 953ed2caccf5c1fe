"""The "modelopt" dialect, as vLLM, SGLang and TensorRT-LLM read it: parts go to disk as they are.

Two homes hold the same truth: ``hf_quant_config.json`` (nested) and ``quantization_config`` in
``config.json`` (flat). Everything in them follows from what is written, not from the recipe.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from modelopt_lite.dialects.base import Contents, Dialect
from modelopt_lite.formats.base import TensorSpec
from modelopt_lite.formats.cache import CacheFormat
from modelopt_lite.formats.declared import MIXED, Declared, has_channel_scales, has_factors
from modelopt_lite.formats.linear import LinearFormat

QUANT_CONFIG_FILE = "hf_quant_config.json"
# TensorRT-LLM knows the nested file by the producer's name; the version is the dialect's.
_PRODUCER = {"name": "modelopt", "version": "0.47.0"}
# Algorithms whose group size the peer leaves out.
_PEER_SILENT = {"fp8_pb_wo", "mxfp4"}
# The only single formats that the peer describes in numbers, too; others are known by name alone.
_PEER_GROUPS = {"FP8", "NVFP4", "W4A16_NVFP4", "NVFP4_SVD"}


class ModelOpt(Dialect):
    """Names, shapes and configs of NVIDIA Model Optimizer's unified checkpoints."""

    name = "modelopt"
    extra_files = (QUANT_CONFIG_FILE,)

    def problem(self, fmt: LinearFormat, shape: tuple[int, ...]) -> str | None:
        """See `Dialect.problem`."""
        return None

    def cache_problem(self, cache: CacheFormat) -> str | None:
        """See `Dialect.cache_problem`."""
        return None

    def pre_quant_scale_problem(self, fmt: LinearFormat) -> str | None:
        """See `Dialect.pre_quant_scale_problem`."""
        algo = algo_name(fmt, "scale")
        if has_channel_scales(algo):
            return None
        return f"quant_algo {algo} has no scales of the channels of inputs"

    def factors_problem(self, fmt: LinearFormat) -> str | None:
        """See `Dialect.factors_problem`."""
        algo = algo_name(fmt, "factors")
        if has_factors(algo):
            return None
        return f"quant_algo {algo} has no low-rank factors beside a matrix, NVFP4_SVD alone has"

    def tensors(
        self, fmt: LinearFormat, parts: Sequence[TensorSpec], shape: tuple[int, ...]
    ) -> tuple[TensorSpec, ...]:
        """See `Dialect.tensors`."""
        return tuple(parts)

    def encode(
        self, fmt: LinearFormat, parts: Mapping[str, Tensor], shape: tuple[int, ...]
    ) -> dict[str, Tensor]:
        """See `Dialect.encode`."""
        return dict(parts)

    def decode(self, fmt: LinearFormat, stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """See `Dialect.decode`."""
        scalars = {"weight_scale_2", "input_scale"}
        if fmt.group_size is None and stored["weight_scale"].numel() == 1:
            scalars.add("weight_scale")
        return {k: v.reshape(()) if k in scalars and v.ndim else v for k, v in stored.items()}

    def decoded_shape(
        self, fmt: LinearFormat, codes: tuple[int, ...], *, stacked_input_major: bool
    ) -> tuple[int, ...]:
        """See `Dialect.decoded_shape`."""
        return fmt.decoded_shape(codes, stacked_input_major=stacked_input_major)

    def code_dtype(self, fmt: LinearFormat) -> torch.dtype:
        """See `Dialect.code_dtype`."""
        return fmt.codec.code_dtype

    def cache_scales(self, key: str, value: str) -> tuple[str, str]:
        """See `Dialect.cache_scales`."""
        return f"{key}.k_scale", f"{value}.v_scale"

    def scalar_shape(self) -> tuple[int, ...]:
        """See `Dialect.scalar_shape`."""
        return ()

    def quantization_config(self, contents: Contents) -> dict[str, Any]:
        """See `Dialect.quantization_config`."""
        formats = contents.distinct
        section: dict[str, Any] = {}
        if groups := _config_groups(contents):
            section["config_groups"] = groups
        if len(formats) == 1:
            section |= {"ignore": list(contents.unquantized), **_layer(formats[0], contents)}
        elif formats:
            section |= {"quantized_layers": _layers(contents), "ignore": [], "quant_algo": MIXED}
        else:
            section["ignore"] = []
        if (algo := _kv_algo(contents)) is not None:
            eight = {"dynamic": False, "num_bits": 8, "type": "float"}
            section["kv_cache_scheme"] = eight if algo == "FP8" else algo
        section["producer"] = dict(_PRODUCER)
        section["quant_method"] = "modelopt"
        return section

    def extra_configs(self, contents: Contents) -> dict[str, dict[str, Any]]:
        """See `Dialect.extra_configs`."""
        return {QUANT_CONFIG_FILE: _nested_config(contents)}

    def stated(self, section: Mapping[str, Any]) -> Declared:
        """See `Dialect.stated`."""
        return Declared.of(section)


def _nested_config(contents: Contents) -> dict[str, Any]:
    kv_cache = {"kv_cache_quant_algo": _kv_algo(contents)}
    formats = contents.distinct
    if len(formats) == 1:
        layer = _layer(formats[0], contents)
        section = {"quant_algo": layer.pop("quant_algo"), **kv_cache, **layer}
        section["exclude_modules"] = list(contents.unquantized)
    else:  # what is not listed is not quantized
        section = {"quant_algo": MIXED if formats else None, **kv_cache}
        section["quantized_layers"] = _layers(contents)
    return {"producer": dict(_PRODUCER), "quantization": section}


def _kv_algo(contents: Contents) -> str | None:
    """Name of the cache's format. The peer calls affine FP8 plain, which loses its biases."""
    if contents.cache is None:
        return None
    algo = contents.cache.algo
    return "FP8" if algo == "FP8_AFFINE" and contents.numerics == "modelopt" else algo


def _layer(fmt: LinearFormat, contents: Contents) -> dict[str, Any]:
    """What describes one format: its name and, with blocks, their size."""
    layer: dict[str, Any] = {"quant_algo": _algo(fmt, contents)}
    silent = contents.numerics == "modelopt" and fmt.quant_algo in _PEER_SILENT
    if fmt.group_size is not None and not silent:
        layer["group_size"] = fmt.group_size
    if any(part in layer["quant_algo"] for part in ("AWQ", "SVD")):
        # Readers look for what the peer states even where it does not hold.
        layer |= {"has_zero_point": False, "pre_quant_scale": contents.pre_quant_scale}
    if "SVD" in layer["quant_algo"] and contents.numerics == "exact":
        layer["lora_rank"] = contents.rank
    return layer


def algo_name(fmt: LinearFormat, beside: str = "") -> str:
    """Name of a format; NVFP4 has another with factors, or with scales of inputs' channels."""
    names = {"scale": "NVFP4_AWQ", "factors": "NVFP4_SVD"} if fmt.name == "nvfp4" else {}
    return names.get(beside, fmt.quant_algo)


def _algo(fmt: LinearFormat, contents: Contents) -> str:
    if contents.rank:
        return algo_name(fmt, "factors")
    return algo_name(fmt, "scale" if contents.pre_quant_scale else "")


def _layers(contents: Contents) -> dict[str, dict[str, Any]]:
    return {name: _layer(fmt, contents) for name, fmt in contents.formats.items()}


def _config_groups(contents: Contents) -> dict[str, Any]:
    """The groups that describe each format in numbers."""
    formats = contents.distinct
    if len(formats) == 1:
        described = _algo(formats[0], contents) in _PEER_GROUPS or contents.numerics == "exact"
        return {"group_0": _group(formats[0], ["Linear"])} if described else {}
    return {
        f"group_{index}": _group(
            fmt, sorted(name for name, other in contents.formats.items() if other.name == fmt.name)
        )
        for index, fmt in enumerate(formats)
    }


def _group(fmt: LinearFormat, targets: list[str]) -> dict[str, Any]:
    codec, inputs = fmt.codec, fmt.inputs
    weights = _numbers(codec.num_bits, codec.kind, codec.block, dynamic=False)
    group: dict[str, Any] = {"weights": weights, "targets": targets}
    if inputs.bits is None:
        return group
    dynamic = not fmt.static_input
    numbers = _numbers(inputs.bits, inputs.kind, inputs.group_size, dynamic=dynamic)
    return {"input_activations": numbers, **group}


def _numbers(bits: int, kind: str, group_size: int | None, *, dynamic: bool) -> dict[str, Any]:
    numbers: dict[str, Any] = {"dynamic": dynamic, "num_bits": bits, "type": kind}
    if group_size is not None:
        numbers["group_size"] = group_size
    return numbers
