"""What searches of scales take in memory, from shapes alone: a part of `predict`."""

from __future__ import annotations

import math
from dataclasses import dataclass

from modelopt_lite.calibrate.algorithm import Algorithm
from modelopt_lite.calibrate.algorithms import make_algorithm
from modelopt_lite.calibrate.observe import Site
from modelopt_lite.export.inputs import sites_of
from modelopt_lite.job import Job
from modelopt_lite.plan import Matrix

# Measured, docs/performance.md: products and decompositions in float32 bring code and buffers of a
# library of their own into memory.
_FLOAT_PRODUCTS = 40 << 20


@dataclass(frozen=True, slots=True)
class Seen:
    """What enters a model's matrices.

    Attributes:
        tokens: Of all batches.
        share: The part of them that one expert sees, at most.
        itemsize: Bytes of an element.
    """

    tokens: int
    share: float
    itemsize: int


def search_memory(job: Job, seen: Seen) -> dict[str, int]:
    """Return the bytes of what a search keeps of inputs, and of what it computes with.

    Those of one layer, at most: layers are searched one after another.
    """
    algorithm = make_algorithm(job.plan.recipe.algorithm, job.plan.numerics)
    if algorithm is None:
        return {}
    parents = {unit.name: unit.parent or unit.name for unit in job.plan.units}
    inputs: dict[str, dict[Site, int]] = {}
    made = dict.fromkeys(parents.values(), 0)
    scratch = 0
    for m in job.plan.matrices:
        rows, columns = _sides(m)
        for site in sites_of(m, m.seen_at):
            kept = _rows_kept(algorithm, site, seen)
            inputs.setdefault(parents[m.unit], {})[site] = _statistics(
                algorithm, columns, kept, seen.itemsize
            )
            scratch = max(scratch, algorithm.scratch(rows, columns, kept))
            made[parents[m.unit]] += rows * columns * seen.itemsize * algorithm.replaces
    if scratch:
        scratch += _FLOAT_PRODUCTS
    return {
        "statistics of inputs": max((sum(s.values()) for s in inputs.values()), default=0),
        "searching": scratch + max(made.values(), default=0),
    }


def _sides(m: Matrix) -> tuple[int, int]:
    rows, columns = m.shape[-2:]
    return (columns, rows) if m.input_major and m.stacked else (rows, columns)


def _rows_kept(algorithm: Algorithm, site: Site, seen: Seen) -> int:
    if "rows" not in algorithm.kinds:
        return 0
    rows = math.ceil(seen.tokens * (1.0 if site.expert is None else seen.share))
    limit = algorithm.row_limit(site)
    return rows if limit is None else min(rows, limit)


def _statistics(algorithm: Algorithm, columns: int, kept: int, itemsize: int) -> int:
    """Bytes at one site; see `calibrate.statistics.Seen`."""
    size = columns * itemsize * kept
    if "channels" in algorithm.kinds:  # the amax, and two sums in float32
        size += columns * (itemsize + 8)
    if "gram" in algorithm.kinds:
        size += 4 * columns**2
    if "blocks" in algorithm.kinds:
        size += 4 * 16 * columns
    return size
