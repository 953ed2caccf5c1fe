"""Turn the tensors of one unit into the tensors of the export."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

from modelopt_lite.dialects.base import Dialect
from modelopt_lite.errors import InternalError, NonFiniteError
from modelopt_lite.export.keep_codes import Kept, Powers, keep_signs_of_zeros, kept_scales
from modelopt_lite.export.sources import part_of
from modelopt_lite.export.treat import Treated
from modelopt_lite.formats.base import Numerics, amax
from modelopt_lite.formats.errors import ErrorReport
from modelopt_lite.formats.linear import FORMATS, LinearFormat, measure_error
from modelopt_lite.plan import Matrix
from modelopt_lite.select import Output
from modelopt_lite.words import counted

Write = Callable[[Output, Tensor], None]


def quantize_matrices(
    matrices: Iterable[Matrix],
    sources: Mapping[str, Tensor],
    source_amax: Mapping[str, Tensor],
    write: Write,
    *,
    numerics: Numerics,
    dialect: Dialect,
    verify: bool,
    treated: Treated | None = None,
    powers: Powers = lambda source, input_major: None,
) -> dict[str, ErrorReport]:
    """Quantize whole groups of matrices and hand every tensor but input scales to the writer.

    Args:
        matrices: All matrices of one unit; no weight group may lie in two units.
        sources: Name on disk -> values in the dtype of the disk.
        source_amax: Name on disk -> largest magnitude, as `check_finite` gives it.
        write: Takes each finished tensor.
        numerics: Arithmetic of scales and quotients.
        dialect: The one that the matrices' outputs belong to.
        verify: Compare what was packed with the source, while that is in memory.
        treated: What an algorithm makes of the matrices first; None leaves them.
        powers: Exponents of what lies in MXFP4 on disk, whose codes are kept where they can be.

    Returns:
        Module -> how far it is from its source; empty without ``verify``.
    """
    matrices = list(matrices)
    group_amax = weight_amax(matrices, sources, source_amax, treated, numerics)
    kept: dict[str, Kept] = {}
    if treated is None and numerics == "exact":
        values = {m.name: _oriented(m, matrix_value(m, sources)) for m in matrices}
        kept = kept_scales(matrices, values, powers)
    errors = {}
    for matrix in matrices:
        fmt = FORMATS[matrix.format]
        weight = matrix_value(matrix, sources)
        extras: dict[str, Tensor] = {}
        chosen, clips = None, matrix.name in kept
        if treated is not None:
            weight, extras = treated.weight(matrix, weight), treated.extras(matrix)
            chosen, clips = treated.scale_amax(matrix), treated.clips(matrix)
        shared = group_amax[matrix.weight_group]
        if matrix.name in kept:
            shared, chosen = kept[matrix.name].amax, kept[matrix.name].scale_amax
        stacked_input_major = matrix.input_major and weight.ndim == 3
        tensors = fmt.quantize(
            weight,
            None if shared.ndim else shared,
            numerics=numerics,
            input_major=stacked_input_major,
            scale_dtype=dialect.scale_dtype,
            scale_amax=shared if shared.ndim else chosen,
        )
        if matrix.name in kept:
            codes = _oriented(matrix, tensors["weight"])
            codes = keep_signs_of_zeros(codes, _oriented(matrix, weight))
            tensors["weight"] = _oriented(matrix, codes).contiguous()
        if verify:
            turned = fmt.turns(stacked_input_major, numerics)
            errors[matrix.name] = measure_error(
                fmt, weight, tensors, numerics=numerics, turned=turned, chosen=clips
            )
        _write_outputs(matrix, fmt, {**tensors, **extras}, dialect, write)
    return errors


def _oriented(matrix: Matrix, value: Tensor) -> Tensor:
    """Turn a stack [E, in, out] to [E, out, in], or back."""
    return value.mT if matrix.input_major and value.ndim == 3 else value


def _write_outputs(
    matrix: Matrix,
    fmt: LinearFormat,
    tensors: dict[str, Tensor],
    dialect: Dialect,
    write: Write,
) -> None:
    """Write what stands for a matrix on disk, but for the scale of its inputs."""
    outputs = {k: v for k, v in matrix.outputs.items() if dialect.part_of(k) != "input_scale"}
    stored = dialect.encode(fmt, tensors, matrix.shape)
    if stored.keys() != outputs.keys():
        raise InternalError(
            f"{matrix.name}: {fmt.name} made {sorted(stored)}, the plan says {sorted(outputs)}"
        )
    for suffix, tensor in stored.items():
        write(outputs[suffix], tensor)


def check_finite(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the largest magnitude of each tensor of floating-point numbers.

    Raises:
        NonFiniteError: It names the first tensor with a NaN or an infinity in it.
    """
    largest = {}
    for name, value in tensors.items():
        if not value.is_floating_point():
            continue
        largest[name] = amax(value)
        if not bool(torch.isfinite(largest[name])):
            count = int((~torch.isfinite(value)).sum())
            raise NonFiniteError(
                f"tensor {name!r} holds {counted(count, 'value')} that "
                f"{'is' if count == 1 else 'are'} NaN or infinite; repair the checkpoint or "
                "download it again"
            )
    return largest


def matrix_value(matrix: Matrix, sources: Mapping[str, Tensor]) -> Tensor:
    """The matrix as [R, K] (stacked experts as on disk); a view of the source tensor."""
    value = part_of(sources, matrix.source, matrix.region)
    return value.mT if matrix.input_major and value.ndim == 2 else value


def weight_amax(
    matrices: Iterable[Matrix],
    sources: Mapping[str, Tensor],
    source_amax: Mapping[str, Tensor],
    treated: Treated | None,
    numerics: Numerics,
) -> dict[str, Tensor]:
    """Return the largest magnitude of each weight group, or what each of its scales stands for."""
    groups: dict[str, Tensor] = {}
    for matrix in matrices:
        if treated is not None:
            weight = treated.weight(matrix, matrix_value(matrix, sources))
            fmt, together = FORMATS[matrix.format], matrix.weight_group != matrix.name
            apart = together and not fmt.shares_amax(tuple(weight.shape), numerics)
            own = fmt.codec.scale_amax(weight) if apart else amax(weight)
            clipped = treated.amax(matrix)
            own = own if clipped is None else clipped
        elif matrix.region:
            own = amax(matrix_value(matrix, sources))
        else:
            own = source_amax[matrix.source]
        before = groups.get(matrix.weight_group)
        groups[matrix.weight_group] = own if before is None else torch.maximum(before, own)
    return groups
