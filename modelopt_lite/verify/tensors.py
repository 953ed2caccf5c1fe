"""Rules 3 and 4: every value is finite, every scale above zero, every packed weight complete."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from modelopt_lite.checkpoint.header import TensorInfo
from modelopt_lite.formats.declared import same_shape
from modelopt_lite.verify.export import PACKED_DTYPES, Export, Module, chunks
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
    wanted_weight = fmt.codec.code_dtype
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
    wanted = {spec.suffix: spec for spec in fmt.tensors(shape, stacked_input_major=major)}
    del wanted["weight"]
    for suffix, spec in wanted.items():
        info = module.scales.get(suffix)
        if info is None:
            yield _missing(module, suffix, fmt.quant_algo)
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
    allowed = {"pre_quant_scale"} if export.smoothed else set()
    factors = {suffix for suffix in module.scales if "svdquant_lora_" in suffix}
    allowed |= factors if "SVD" in (export.algo or "") else set()
    if extra := sorted(set(module.scales) - set(wanted) - allowed):
        yield Finding(
            "scale-unexpected",
            f"{weight.file}: {module.name!r} has {shorten(extra)}, which {fmt.quant_algo} does "
            "not have; the config and the tensors do not belong together, export again",
        )


def _missing(module: Module, suffix: str, algo: str | None) -> Finding:
    joint = "_" if module.stacked else "."
    where = module.weight.file if module.weight else "the checkpoint"
    return Finding(
        "scale-missing",
        f"{where}: {module.name}{joint}{suffix} does not exist, and {algo} needs it; engines read "
        "uninitialized memory instead, export again",
    )


def _names(module: Module) -> str:
    return shorten(sorted(info.name for info in module.scales.values()))


def check_values(export: Export) -> Iterator[Finding]:
    """Scan every tensor, 16 MiB at a time.

    Rules: ``value-finite``, ``weight-nan``, ``scale-value``.
    """
    scales = {
        info.name
        for module in export.modules.values()
        for suffix, info in module.scales.items()
        if "svdquant_lora_" not in suffix  # factors, of either sign
    }
    scales.update(scale.tensor.name for scale in export.kv_scales)
    for name, info in export.tensors.items():
        if name in scales:
            if bad := _first_bad(info, _bad_scale):
                yield Finding(
                    "scale-value",
                    f"{info.file}: {name!r} holds {bad}; every scale must be finite and above 0, "
                    "export again",
                )
        elif info.dtype == torch.float8_e4m3fn:
            if _first_bad(info, _nan_codes):
                yield Finding(
                    "weight-nan",
                    f"{info.file}: {name!r} holds a NaN code (0x7f or 0xff); export again",
                )
        elif info.dtype.is_floating_point and (bad := _first_bad(info, _not_finite)):
            yield Finding(
                "value-finite",
                f"{info.file}: {name!r} holds {bad}; repair the source, or export again if it is "
                "finite there",
            )


def _first_bad(info: TensorInfo, test: Callable[[Tensor], Tensor]) -> str | None:
    """Return the first value that a test marks, as text; None if there is none."""
    for part in chunks(info):
        marked = test(part)
        if bool(marked.any()):
            value = part[int(marked.int().argmax())]
            if value.dtype == torch.uint8:
                return f"the byte {int(value)}"
            return f"{float(value)}"
    return None


def _bad_scale(part: Tensor) -> Tensor:
    if part.dtype == torch.uint8:  # E8M0: 2**(byte - 127), 255 is NaN
        return part == 255
    if part.dtype in PACKED_DTYPES:
        part = part.view(torch.uint8)
        return ((part & 0x7F) == 0x7F) | (part == 0) | (part >= 0x80)
    value = part.float()
    return ~(value.isfinite() & (value > 0))


def _nan_codes(part: Tensor) -> Tensor:
    return (part.view(torch.uint8) & 0x7F) == 0x7F


def _not_finite(part: Tensor) -> Tensor:
    return ~(part if part.itemsize > 1 else part.float()).isfinite()
