"""Rules 3 and 4: every value is finite, every scale above zero, every packed weight complete."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from modelopt_lite.checkpoint.header import TensorInfo
from modelopt_lite.formats import nvfp4
from modelopt_lite.formats.declared import has_channel_scales, has_factors, same_shape
from modelopt_lite.verify.export import NO_SCALES, PACKED_DTYPES, Export, Module, chunks, scalar
from modelopt_lite.verify.findings import Finding, shorten


def check_layout(export: Export) -> Iterator[Finding]:
    """Compare each packed module's tensors with what its format demands. Reads headers only.

    Rules: ``scale-orphan``, ``scale-on-unpacked``, ``scale-missing``, ``scale-unexpected``,
    ``scale-dtype``, ``scale-shape``, ``weight-dtype``, ``weight-shape``.
    """
    for module in export.modules.values():
        if module.weight is None:
            yield Finding(
                "scale-orphan",
                f"{export.folder}: {_names(module)} belong to no weight of {module.name!r}; "
                "export again",
            )
        elif module.packed:
            yield from _check_packed(export, module, module.weight)
        elif module.scales:
            yield Finding(
                "scale-on-unpacked",
                f"{module.weight.file}: {module.weight.name!r} is {module.weight.dtype}, not "
                f"codes, but has {_names(module)}; export again",
            )


def _check_packed(export: Export, module: Module, weight: TensorInfo) -> Iterator[Finding]:
    fmt = export.format_of(module)
    if fmt is None:
        if "weight_scale" not in module.scales:
            yield _missing(module, "weight_scale", export.algo)
        return
    shape = export.logical_shape(module)
    major = export.is_turned(module)
    wanted_weight = export.dialect.code_dtype(fmt)
    if weight.dtype != wanted_weight:
        yield Finding(
            "weight-dtype",
            f"{weight.file}: {weight.name!r} is {weight.dtype}, {fmt.quant_algo} stores "
            f"{wanted_weight}; the config and the weights do not belong together, export again",
        )
        return
    if problem := fmt.problem(shape, stacked_input_major=major):
        yield Finding(
            "weight-shape",
            f"{weight.file}: {weight.name!r} {list(weight.shape)} cannot be {fmt.quant_algo}: "
            f"{problem}; export again",
        )
        return
    _, *beside = export.wanted(fmt, shape, major)
    wanted = {export.dialect.part_of(spec.suffix): spec for spec in beside}
    for part, spec in wanted.items():
        info = module.scales.get(part)
        if info is None:
            yield _missing(module, spec.suffix, fmt.quant_algo)
        elif info.dtype != spec.dtype:
            yield Finding(
                "scale-dtype",
                f"{info.file}: {info.name!r} is {info.dtype}, {fmt.quant_algo} stores "
                f"{spec.dtype}; export again",
            )
        elif not same_shape(info.shape, spec.shape):
            yield Finding(
                "scale-shape",
                f"{info.file}: {info.name!r} has shape {list(info.shape)}, a weight of shape "
                f"{list(shape)} needs {list(spec.shape)}; export again",
            )
    yield from _check_packed_shape(export, module, shape)
    algo = export.declared.algo_of(module.name)
    allowed = {"pre_quant_scale"} if has_channel_scales(algo) else set()
    allowed |= {"weight_zero_point", "input_zero_point"}  # of zeros, and read by nobody
    factors = {suffix for suffix in module.scales if "svdquant_lora_" in suffix}
    allowed |= factors if has_factors(algo) else set()
    if extra := sorted(set(module.scales) - set(wanted) - allowed):
        yield Finding(
            "scale-unexpected",
            f"{weight.file}: {module.name!r} has {shorten(extra)}, which {fmt.quant_algo} does "
            "not have; the config and the tensors do not belong together, export again",
        )


_LEFT_OVER = re.compile(r".*(_quantizer\..*|[._]amax)")


def check_leftovers(export: Export) -> Iterator[Finding]:
    """Rule ``leftover-tensor``."""
    kept = {info.name for module in export.modules.values() for info in module.scales.values()}
    names = [n for n in export.tensors if n not in kept and _LEFT_OVER.fullmatch(n)]
    if names:
        yield Finding(
            "leftover-tensor",
            f"{export.folder}: {shorten(names)} is a part of a quantizer, which no engine reads; "
            "export again",
        )


def check_global_scales(export: Export) -> Iterator[Finding]:
    """Rule ``scale-convention``: a weight above 2688 is likelier a reciprocal taken for a scale."""
    limit = 1.0
    for module in export.packed():
        info, fmt = module.scales.get("weight_scale_2"), export.format_of(module)
        if info is None or info.numel != 1 or fmt is None or fmt.group_size != nvfp4.BLOCK:
            continue
        scale = scalar(export.checkpoint, info)
        if export.dialect.parts.get("weight_global_scale") and scale:
            scale = 1 / scale
        if limit < scale < float("inf"):
            yield Finding(
                "scale-convention",
                f"{info.file}: {info.name!r} says that weights reach {2688 * scale:.4g}; if they "
                "do not, it is the reciprocal of what this dialect stores, export again",
                "warning",
            )


def _check_packed_shape(
    export: Export, module: Module, shape: tuple[int, ...]
) -> Iterator[Finding]:
    """Rule ``packed-shape``."""
    info = module.scales.get("weight_shape")
    if info is None or info.shape != (2,) or info.dtype != torch.int64:
        return
    stated = tuple(export.checkpoint.read(info.name).tolist())
    if stated != shape:
        yield Finding(
            "packed-shape",
            f"{info.file}: {info.name!r} states {list(stated)}, and the codes stand for "
            f"{list(shape)}; export again",
        )


def _missing(module: Module, suffix: str, algo: str | None) -> Finding:
    own = module.weight is not None and module.weight.name == module.name
    joint = "_" if module.stacked and own else "."
    where = module.weight.file if module.weight else "the checkpoint"
    return Finding(
        "scale-missing",
        f"{where}: {module.name}{joint}{suffix} does not exist, and {algo} needs it; engines read "
        "uninitialized memory instead, export again",
    )


def _names(module: Module) -> str:
    return shorten(sorted(info.name for info in module.scales.values()))


def check_values(export: Export) -> Iterator[Finding]:
    """Scan every tensor, a mebibyte at a time.

    Rules: ``value-finite``, ``weight-nan``, ``scale-value``.
    """
    scales = {
        info.name
        for module in export.modules.values()
        for suffix, info in module.scales.items()
        if "svdquant_lora_" not in suffix  # factors, of either sign
        and suffix not in NO_SCALES
    }
    scales.update(scale.tensor.name for scale in export.kv_scales)
    for name, info in export.tensors.items():
        if name in scales:
            if bad := _first_bad(info, _scales(info.dtype)):
                yield Finding(
                    "scale-value",
                    f"{info.file}: {name!r} holds {bad}; every scale must be finite and above 0, "
                    "export again",
                )
        elif info.dtype == torch.float8_e4m3fn:
            if _first_bad(info, _finite(info.dtype)):
                yield Finding(
                    "weight-nan",
                    f"{info.file}: {name!r} holds a NaN code (0x7f or 0xff); export again",
                )
        elif info.dtype.is_floating_point and (bad := _first_bad(info, _finite(info.dtype))):
            yield Finding(
                "value-finite",
                f"{info.file}: {name!r} holds {bad}; repair the source, or export again if it is "
                "finite there",
            )


class _Range(NamedTuple):
    """What values may be: ``key`` turns a piece of a tensor into numbers from ``low`` to ``high``.

    A NaN is out of every range.
    """

    key: Callable[[Tensor], Tensor]
    low: float
    high: float


def _first_bad(info: TensorInfo, allowed: _Range) -> str | None:
    """Return the first value that is out of its range, as text; None if there is none."""
    for part in chunks(info):
        numbers = allowed.key(part)
        # One pass; only where it finds something do slower ones look for the place.
        low, high = torch.aminmax(numbers)
        if low >= allowed.low and high <= allowed.high:
            continue
        fits = (numbers >= allowed.low) & (numbers <= allowed.high)
        value = part[int(fits.int().argmin())]
        if value.dtype == torch.uint8:
            return f"the byte {int(value)}"
        return f"{float(value)}"
    return None


def _scales(dtype: torch.dtype) -> _Range:
    """Finite and above 0."""
    if dtype == torch.uint8:  # E8M0: 2**(byte - 127), 255 is NaN
        return _Range(lambda part: part, 0, 254)
    if dtype in PACKED_DTYPES:
        return _Range(lambda part: part.view(torch.uint8), 0x01, 0x7E)
    return _Range(lambda part: part.float(), 2.0**-149, torch.finfo(torch.float32).max)


def _finite(dtype: torch.dtype) -> _Range:
    if dtype == torch.float8_e4m3fn:
        return _Range(lambda part: part.view(torch.uint8) & 0x7F, 0x00, 0x7E)
    largest = torch.finfo(dtype).max
    return _Range(lambda part: part if part.itemsize > 1 else part.float(), -largest, largest)
