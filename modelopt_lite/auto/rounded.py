"""What each candidate format makes of a layer's products, one matrix at a time.

Shape suffixes: N rows of inputs, K columns of inputs, R rows of a matrix (columns of outputs).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from modelopt_lite.auto.space import Space
from modelopt_lite.calibrate.observe import Site
from modelopt_lite.checkpoint.names import NameMap
from modelopt_lite.export.inputs import amax_of_groups, sites_of
from modelopt_lite.export.quantize import check_finite, matrix_value, weight_amax
from modelopt_lite.formats.codecs.base import unstacked
from modelopt_lite.formats.linear import FORMATS, LinearFormat
from modelopt_lite.offload.store import Loaded
from modelopt_lite.plan import Matrix, Plan

_ELEMENTS = 1 << 22  # of a product that is looked at at a time: 16 MiB in float32

Scales = Mapping[str, Mapping[str, Tensor]]
"""Format -> input group -> ``input_scale``."""


@dataclass(frozen=True, slots=True)
class Rounded:
    """What a format makes of a matrix.

    Attributes:
        format: The format.
        tensors: Those of the matrix, its rows first.
        input_scale: Of what enters it; None where the format has none.
    """

    format: LinearFormat
    tensors: dict[str, Tensor]
    input_scale: Tensor | None


@dataclass(frozen=True, slots=True)
class Part:
    """A matrix, or an expert of a stack, at the site where inputs enter it.

    Attributes:
        group: The group that it belongs to.
        weight: Its values [R, K], as they are on disk; a view of the layer's memory.
        target: The same in the model itself.
        columns: Which columns of the site's product are its own.
        rounded: By format.
    """

    group: str
    weight: Tensor
    target: Tensor
    columns: slice | Tensor
    rounded: dict[str, Rounded]

    def differences(self, x_NK: Tensor) -> Iterator[tuple[str, slice, Tensor]]:
        """Yield a format, some rows of the matrix, and how far their product is off [N, rows].

        The product is that of rounded inputs and a rounded matrix, in the dtype of the inputs; the
        difference from the product without rounding is float32.
        """
        for name, rounded in self.rounded.items():
            codec = rounded.format.codec
            rounded_NK = rounded.format.fake_quantize_input(x_NK, rounded.input_scale)
            step = max(1, _ELEMENTS // max(1, len(x_NK)))
            step = -(-step // codec.row_multiple) * codec.row_multiple
            for start in range(0, len(self.weight), step):
                rows = slice(start, min(start + step, len(self.weight)))
                w_RK = codec.dequantize(codec.part(rounded.tensors, rows), x_NK.dtype)
                made_NR = functional.linear(rounded_NK, w_RK).float()
                yield name, rows, made_NR.sub_(functional.linear(x_NK, self.weight[rows]))


def input_scales(
    space: Space, unit: str, amax: Mapping[Site, Tensor]
) -> dict[str, dict[str, Tensor]]:
    """Return the scales that exports would have for the inputs of a layer's matrices.

    Args:
        space: What is searched.
        unit: The layer.
        amax: Largest magnitude of what entered each site.

    Raises:
        CalibrationError: Nothing entered a matrix, nor its peers among the experts.
    """
    found: dict[str, dict[str, Tensor]] = {}
    for fmt, plan in space.plans.items():
        matrices = [m for m in plan.matrices if m.unit == unit]
        seen = amax_of_groups(
            matrices, lambda m: [amax[s] for s in sites_of(m, m.site) if s in amax]
        )
        format_of = {m.input_group: FORMATS[m.format] for m in matrices}
        found[fmt] = {g: format_of[g].input_scale(value) for g, value in seen.items()}
    return found


def layer_parts(
    space: Space, loaded: Loaded, scales: Scales, buffer_of: Callable[[str], Tensor]
) -> dict[Site, list[Part]]:
    """Quantize a layer that is in memory in every format, and return its parts by site.

    Args:
        space: What is searched.
        loaded: The layer.
        scales: Of its inputs.
        buffer_of: Returns an entry of the model.

    Raises:
        NonFiniteError: A tensor holds NaN or infinity.
    """
    largest = check_finite(loaded.sources)
    groups = space.group_of()
    parts: dict[tuple[str, int | None], tuple[Site, Part]] = {}
    for name, plan in space.plans.items():
        mine = [m for m in plan.matrices if m.unit == loaded.unit.name and m.name in groups]
        amax = weight_amax(mine, loaded.sources, largest, None, plan.numerics)
        for m in mine:
            fmt, shared = FORMATS[m.format], amax[m.weight_group]
            tensors = _quantized(fmt, m, plan, loaded.sources, shared)
            scale = scales[name].get(m.input_group) if m.input_group is not None else None
            stack = len(m.shape) == 3
            for expert, site in enumerate(sites_of(m, m.site)):
                key = m.name, expert if stack else None
                if key not in parts:
                    part = _part(groups[m.name], m, expert, plan.names, loaded, buffer_of)
                    parts[key] = site, part
                parts[key][1].rounded[name] = Rounded(fmt, tensors[expert], scale)
    by_site: dict[Site, list[Part]] = {}
    for site, part in parts.values():
        by_site.setdefault(site, []).append(part)
    return by_site


def _part(
    group: str,
    m: Matrix,
    expert: int,
    names: NameMap,
    loaded: Loaded,
    buffer_of: Callable[[str], Tensor],
) -> Part:
    place = names.place(m.source)
    assert place is not None  # as the plan has it
    entry, region = place
    target = buffer_of(entry)
    for part in (region, m.region):
        target = target[part] if part else target
    value = matrix_value(m, loaded.sources)
    if len(m.shape) == 3:
        value = value[expert].mT if m.input_major else value[expert]
        target = target[expert]
    target = target.mT if m.input_major else target
    return Part(group, value, target, output_columns(m, names, buffer_of), {})


def _quantized(
    fmt: LinearFormat, m: Matrix, plan: Plan, sources: Mapping[str, Tensor], shared: Tensor
) -> Sequence[dict[str, Tensor]]:
    """Return the tensors of a matrix, or of each expert of a stack, its rows first."""
    value = matrix_value(m, sources)
    stack = value.ndim == 3
    if stack and m.input_major:
        value = value.mT
    tensors = fmt.codec.quantize(
        value,
        None if shared.ndim else shared,
        numerics=plan.numerics,
        scale_amax=shared if shared.ndim else None,
    )
    return unstacked(tensors) if stack else [tensors]


def output_columns(m: Matrix, names: NameMap, buffer_of: Callable[[str], Tensor]) -> slice | Tensor:
    """Return which columns of a product with a parameter are those of a matrix in it.

    A parameter of the model may hold several matrices, such as gate and up projections, one after
    the other or row by row.
    """
    place = names.place(m.source)
    assert place is not None  # as the plan has it
    entry, region = place
    parameter = buffer_of(entry)
    axis = parameter.ndim - 1 if m.input_major else parameter.ndim - 2
    shape = [1] * parameter.ndim
    shape[axis] = parameter.shape[axis]
    numbers = torch.arange(parameter.shape[axis]).view(shape).expand(parameter.shape)
    for part in (region, m.region):
        numbers = numbers[part] if part else numbers
    own = numbers.select(0, 0) if numbers.ndim == 3 else numbers
    own = own[0] if m.input_major else own[:, 0]
    if own.numel() == parameter.shape[axis]:
        return slice(None)
    first, last = int(own[0]), int(own[-1])
    if last - first + 1 == own.numel():
        return slice(first, last + 1)
    return own
