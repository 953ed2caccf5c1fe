"""Find out how a checkpoint in the compressed-tensors dialect stores each tensor.

The codes and scales tell the kind; the config tells what shapes leave open: bits of integers and
blocks of FP8. Integers are read with any group size, with zero points or without.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from modelopt_lite.checkpoint.header import TensorInfo
from modelopt_lite.checkpoint.layouts import (
    Encoded,
    Integers,
    fp8_kind,
    positive_pair,
    unsupported,
)
from modelopt_lite.checkpoint.reader import Checkpoint
from modelopt_lite.dialects.compressed_tensors import CompressedTensors
from modelopt_lite.dialects.schemes import Scheme, Schemes
from modelopt_lite.errors import CheckpointError
from modelopt_lite.formats import packed

_SCALE = ".weight_scale"
_WEIGHT_BITS = (4, 8)


def compressed_layouts(
    base: Checkpoint, quantization: Mapping[str, Any], dtype: torch.dtype
) -> Iterator[tuple[str, Encoded]]:
    """Yield presented names with their layouts.

    Raises:
        UnsupportedSourceError: Sparse weights, or integers of other widths.
        CheckpointError: A module that no group describes, or shapes that disagree.
    """
    sparsity = quantization.get("sparsity_config") or {}
    if isinstance(sparsity, dict) and sparsity.get("format", "dense") != "dense":
        raise unsupported(base, f"compressed-tensors sparsity {sparsity.get('format')}")
    stated = Schemes.of(quantization)
    dialect = CompressedTensors(dtype)
    for scale in base.tensors:
        if not scale.endswith(_SCALE):
            continue
        module = scale.removesuffix(_SCALE)
        names = (f"{module}.weight_packed", f"{module}.weight")
        codes = next((name for name in names if name in base.tensors), None)
        if codes is None or base.tensors[codes].dtype not in _CODES:
            continue
        scheme = stated.scheme_of(module)
        if scheme is None:
            raise CheckpointError(
                f"{base.path}: {codes!r} holds codes, and no group of the config's "
                "quantization_config describes it; restore the config"
            )
        encoded = _encoded(base, codes, scale, scheme)
        yield f"{module}.weight", replace(encoded, dialect=dialect, served=scheme.known)


_CODES = {torch.float8_e4m3fn, torch.uint8, torch.int8, torch.int32}


def _encoded(base: Checkpoint, codes: str, scale: str, scheme: Scheme) -> Encoded:
    stored, scales = base.tensors[codes], base.tensors[scale]
    if stored.dtype == torch.float8_e4m3fn and scales.dtype != torch.uint8:
        return _fp8(base, stored, scales, scheme)
    if stored.dtype == torch.float8_e4m3fn:
        return Encoded("mxfp8", codes, (scale,))
    if stored.dtype == torch.uint8 and scales.dtype == torch.uint8:
        return Encoded("w4a16_mxfp4", codes, (scale,))
    if stored.dtype == torch.uint8:
        second = codes.replace("weight_packed", "weight_global_scale")
        if second not in base.tensors:
            raise CheckpointError(
                f"{base.path}: tensor {codes!r} lacks {second!r}; restore the scale tensor"
            )
        return Encoded("w4a16_nvfp4", codes, (scale, second))
    return _integers(base, stored, scales, scheme)


def _fp8(base: Checkpoint, codes: TensorInfo, scale: TensorInfo, scheme: Scheme) -> Encoded:
    weights = scheme.weights
    plain = weights.get("num_bits") == 8 and weights.get("type") == "float"
    strategy = weights.get("strategy")
    if not plain or strategy not in {"tensor", "channel", "block"}:
        raise unsupported(base, f"compressed-tensors weights {dict(weights)}")
    given = weights.get("block_structure") if strategy == "block" else None
    block = positive_pair(base, given)
    kind = fp8_kind(base, codes, scale, block)
    return Encoded(kind, codes.name, (scale.name,), block if kind == "fp8_block" else None)


def _integers(base: Checkpoint, codes: TensorInfo, scale: TensorInfo, scheme: Scheme) -> Encoded:
    bits, module = scheme.weights.get("num_bits"), scale.name.removesuffix(_SCALE)
    in_words = codes.dtype == torch.int32
    if scheme.weights.get("type", "int") != "int" or bits not in _WEIGHT_BITS:
        raise unsupported(base, f"compressed-tensors weights {dict(scheme.weights)}")
    if f"{module}.weight_g_idx" in base.tensors:
        raise unsupported(base, f"compressed-tensors in the order of {module}.weight_g_idx")
    others = [scale.name]
    shape = codes.shape
    if in_words:
        named = f"{module}.weight_shape"
        if named not in base.tensors:
            raise CheckpointError(
                f"{base.path}: tensor {codes.name!r} lacks {named!r}; restore the shape tensor"
            )
        shape = tuple(int(size) for size in base.read(named))
        others.append(named)
    zero = f"{module}.weight_zero_point"
    has_zero = zero in base.tensors
    if has_zero:
        others.insert(1, zero)
    integers = Integers(int(bits), shape, in_words, has_zero)
    groups = scale.numel // shape[0] if scale.numel > 1 and shape[0] else 1
    words = packed.words(shape[1], integers.bits) if len(shape) == 2 and in_words else shape[-1]
    whole = scale.numel == 1 or scale.shape in {(shape[0],), (shape[0], groups)}
    if len(shape) != 2 or codes.shape != (shape[0], words) or not whole or shape[1] % groups:
        raise CheckpointError(
            f"{base.path}: scale {scale.name!r} {list(scale.shape)} and codes {codes.name!r} "
            f"{list(codes.shape)} do not belong to a matrix {list(shape)}; save the checkpoint "
            "again"
        )
    return Encoded("integers", codes.name, tuple(others), integers=integers)
