"""What searches of scales take in memory, from shapes alone: a part of `predict`."""

from __future__ import annotations

import math
from dataclasses import dataclass

from modelopt_lite.calibrate.algorithm import Algorithm
from modelopt_lite.calibrate.observe import Site
from modelopt_lite.export.inputs import sites_of
from modelopt_lite.job import Job
from modelopt_lite.plan import Matrix
from modelopt_lite.sharding import expert_sites, stacked_layers

# Measured, docs/performance.md: products and decompositions in float32 bring code and buffers of a
# library of their own into memory.
_FLOAT_PRODUCTS = 40 << 20


@dataclass(frozen=True, slots=True)
class Seen:
    """What enters a model's matrices.

    Attributes:
        tokens: Of all batches.
        batches: How many there are.
        share: The part of the tokens that one expert sees, at most.
        itemsize: Bytes of an element.
    """

    tokens: int
    batches: int
    share: float
    itemsize: int


def search_memory(job: Job, seen: Seen) -> dict[str, int]:
    """Return the bytes of what a search keeps of inputs, and of what it computes with.

    Those of one layer, at most: layers are searched one after another. Of a rank, they are those
    of what it searches, and of what it has to tell the others.
    """
    algorithm = job.algorithm()
    if algorithm is None:
        return {}
    parents = {unit.name: unit.parent or unit.name for unit in job.plan.units}
    rank = _Rank(job)
    inputs: dict[str, dict[Site, int]] = {}
    told: dict[str, dict[Site, int]] = {}
    made = dict.fromkeys(parents.values(), 0)
    scratch = 0
    for m in job.plan.matrices:
        rows, columns = _sides(m)
        layer = parents[m.unit]
        for site in sites_of(m, m.seen_at):
            kept = _rows_kept(algorithm, site, seen)
            width = columns * seen.itemsize
            if rank.sums_up(site, layer):
                size = _statistics(algorithm, columns, kept, seen.itemsize)
                inputs.setdefault(layer, {})[site] = size
            elif rank.hears_of_all:
                inputs.setdefault(layer, {})[site] = width + 8 * columns
            told.setdefault(layer, {})[site] = width * rank.rows_told(site, seen)
            if rank.chooses(m):
                scratch = max(scratch, algorithm.scratch(rows, columns, kept))
        if rank.chooses(m):
            made[layer] += rows * columns * seen.itemsize * algorithm.replaces
    if scratch:
        scratch += _FLOAT_PRODUCTS
    found = {
        "statistics of inputs": max((sum(s.values()) for s in inputs.values()), default=0),
        "searching": scratch + max(made.values(), default=0),
    }
    if job.degrees is not None:
        found["inputs told to other ranks"] = max(sum(s.values()) for s in told.values())
    return found


class _Rank:
    """What of a search one rank does; a single process does it all. See `ranks.crew`.

    Attributes:
        hears_of_all: It is told of the channels of what enters every matrix of a layer.
    """

    def __init__(self, job: Job) -> None:
        self._degrees, self._rank = job.degrees, job.rank
        self._experts = expert_sites(job)
        self._parts = {unit.name for unit in job.plan.units if unit.parent is not None}
        self._own = {unit.name for unit in job.own_units}
        self._jointly = job.plan.numerics == "modelopt"
        self._stacked = stacked_layers(job)
        smooths = job.plan.recipe.algorithm.smooths
        self.hears_of_all = self._degrees is not None and smooths and not self._jointly

    def chooses(self, m: Matrix) -> bool:
        """Whether it chooses what becomes of a matrix."""
        if self._degrees is None:
            return True
        if self._jointly or m.unit not in self._parts:
            return self._rank == 0
        return m.unit in self._own and (not self.hears_of_all or self._degrees.writes(self._rank))

    def sums_up(self, site: Site, layer: str) -> bool:
        """Whether the statistics of a site come to lie here."""
        if self._degrees is None:
            return True
        if self._rank == 0 and (self._jointly or layer in self._stacked):
            return True
        return self._is_own(site) if site in self._experts else self._rank == 0

    def rows_told(self, site: Site, seen: Seen) -> int:
        """Return how many rows it keeps to tell whoever sums them up."""
        if self._degrees is None:
            return 0
        own = len(self._degrees.batches_of(self._rank, seen.batches))
        if site not in self._experts:
            return math.ceil(seen.tokens * own / seen.batches)
        if self._degrees.edp == 1 or not self._is_own(site):
            return 0  # all batches' rows come here, and are summed up as they come
        return math.ceil(seen.tokens * seen.share / self._degrees.edp)

    def _is_own(self, site: Site) -> bool:
        assert self._degrees is not None
        number, count = self._experts[site]
        return number in self._degrees.experts_of(self._rank, count)


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
