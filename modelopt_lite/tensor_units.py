"""Stream a plan that needs no calibration from tensor to tensor, in the order on disk."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from modelopt_lite.checkpoint.header import TensorInfo
from modelopt_lite.formats.cache import CACHE_FORMATS
from modelopt_lite.formats.linear import get_format
from modelopt_lite.offload.units import Unit
from modelopt_lite.plan import Matrix, Plan
from modelopt_lite.recipes import Recipe

UNIT_BYTES = 16 << 20
"""What is read, written and noted at a time, at the least. Each unit costs a sync of the disk."""


READ_AHEAD = 4
"""How many units are in memory, roughly: read, waiting, being quantized, being written."""


def needs_data(recipe: Recipe) -> bool:
    """Whether a recipe asks for anything that depends on the inputs that the model sees.

    Raises:
        RecipeError: An unknown format.
    """
    cache = CACHE_FORMATS[recipe.kv_cache] if recipe.kv_cache else None
    static = [get_format(name).static_input for name in recipe.formats]
    searched = bool(recipe.formats) and recipe.algorithm.needs_inputs
    return searched or any(static) or (cache is not None and cache.scaled)


def stream_tensors(plan: Plan, tensors: Mapping[str, TensorInfo], unit_bytes: int) -> None:
    """Replace a plan's units by runs of tensors on disk.

    Tensors that share a scale are in one unit, which is read where the first of them lies.

    Args:
        plan: Needs no calibration; changed in place.
        tensors: What the source holds, in the order on disk.
        unit_bytes: A unit is closed when it has so many. It may have more only where one tensor
            has, or tensors that share a scale.
    """
    groups = _sharing(tensors, plan.matrices)
    runs: list[list[str]] = []
    filled = unit_bytes
    for group in groups:
        size = sum(tensors[source].nbytes for source in group)
        if filled + size > unit_bytes:
            runs.append([])
            filled = 0
        runs[-1] += group
        filled += size
    plan.units = [Unit(run[0], tuple(run), is_layer=False) for run in runs]
    unit_of = {source: run[0] for run in runs for source in run}
    plan.by_tensor = True
    plan.matrices = [replace(m, unit=unit_of[m.source]) for m in plan.matrices]


def _sharing(tensors: Iterable[str], matrices: Iterable[Matrix]) -> list[list[str]]:
    """Group tensors whose matrices share a scale, by the place of each group's first."""
    above: dict[str, str] = {}

    def root(source: str) -> str:
        while (next_one := above.get(source, source)) != source:
            source = next_one
        return source

    first: dict[str, str] = {}
    for matrix in matrices:
        one, other = root(matrix.source), root(first.setdefault(matrix.weight_group, matrix.source))
        if one != other:
            above[one] = other
    groups: dict[str, list[str]] = {}
    for source in tensors:
        groups.setdefault(root(source), []).append(source)
    return list(groups.values())
