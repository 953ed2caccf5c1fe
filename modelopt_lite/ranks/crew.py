"""What a rank of several does of a run, and what it learns from the others.

All ranks walk the same units in lockstep, each with its own batches; they meet where rows go to
their experts, and where a unit is finished: there the evidence of all becomes one, each rank writes
its experts, and rank 0 the rest. A rank without batches follows the first batch, unheard.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from modelopt_lite.calibrate.cache import CacheStats
from modelopt_lite.calibrate.model_code import model_code
from modelopt_lite.calibrate.observe import InputStats, InputWatch, Site
from modelopt_lite.errors import InternalError, RecipeError
from modelopt_lite.export.exporter import Exporter
from modelopt_lite.job import Job
from modelopt_lite.offload.store import Loaded
from modelopt_lite.offload.stream import StreamedModel
from modelopt_lite.offload.units import Unit
from modelopt_lite.parallel.experts import (
    Arrived,
    Exchange,
    Routed,
    expert_forward,
    products,
    sent_experts,
)
from modelopt_lite.parallel.team import Team
from modelopt_lite.ranks.stacks import AmaxOnDemand, ReadStacks

_STATION = "#experts"
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class Alone:
    """A run of one process: it sees and writes all."""

    stations: Mapping[str, Sequence[str]] = {}
    silent = False  # whether nobody listens to this rank's passes

    def __init__(self, exporter: Exporter) -> None:
        self._exporter = exporter
        self._evidence = exporter.evidence

    def batches(self, batches: Sequence[Tensor]) -> dict[int, Tensor]:
        """Return the batches that this process sends through the model, by number."""
        return dict(enumerate(batches))

    def visit(self, site: Site, x: Tensor, batched: bool) -> None:
        """Take into account what enters a weight."""
        if self._exporter.rounded:  # its statistics are those of a second run
            self._evidence.inputs.visit(site, x, batched)
        else:
            self._evidence.visit(site, x, batched)

    def visit_cache(self, module: str, key: Tensor, value: Tensor) -> None:
        """Take keys and values into account."""
        self._evidence.cache.visit(module, key, value)

    def learn(self, unit: Unit) -> None:
        """Have all that any rank saw of a unit; called when all passes have left it."""

    def export(
        self, unit: Unit, sources: Mapping[str, Tensor], amax: Mapping[str, Tensor]
    ) -> list[str]:
        """Export what is this process's of a unit; see `Exporter.export`."""
        return self._exporter.export(unit, sources, amax)

    def replace(self, loaded: Loaded) -> None:
        """Put what a layer without its parts has become into the model."""
        self._exporter.replace(loaded)

    def serve(self, station: str) -> None:
        """Run the experts of a container for all ranks; called when all passes wait there."""
        raise InternalError(f"{station!r} was asked for by a single process")

    @contextmanager
    def sending(self, streamed: StreamedModel, watch: InputWatch) -> Iterator[None]:
        """Have experts run where they lie."""
        yield


class Ranks(Alone):
    """One rank of a run.

    Args:
        team: The ranks.
        job: What this one does.
        exporter: Gets what all have seen.
        batches: How many batches the run has.
    """

    def __init__(self, team: Team, job: Job, exporter: Exporter, batches: int) -> None:
        super().__init__(exporter)
        assert job.degrees is not None
        self._team, self._job, self._degrees = team, job, job.degrees
        self._count = batches
        self._own = self._degrees.batches_of(team.rank, batches)
        self.silent = not self._own
        self._inputs, self._cache = InputStats(), CacheStats()
        self._searches = exporter.searches
        # Where scales are chosen for all experts of a layer together, one process chooses them.
        recipe = job.plan.recipe
        self._jointly = recipe.algorithm.smooths or job.plan.numerics == "modelopt"
        self._stacks = {u.parent for u in job.plan.units if u.of_stack}
        self._check_joined(exporter)
        self._log: dict[int, list[tuple[Site, Tensor, bool]]] = {}
        self._batch: int | None = None  # whose rows experts run on
        self._containers: dict[str, list[Unit]] = {}
        self._sizes: dict[str, int] = {}
        stations: dict[str, list[str]] = {}
        for unit in job.plan.units:
            if unit.parent is None or not unit.is_stacked:
                continue
            station = f"{unit.container}{_STATION}"
            of_layer = stations.setdefault(unit.parent, [])
            if station not in of_layer:
                of_layer.append(station)
            self._sizes[unit.container] = unit.count
            parts = self._containers.setdefault(unit.container, [])
            if job.owns(unit):
                parts.append(unit)
        self.stations = stations
        self._streamed: StreamedModel | None = None
        self._watch: InputWatch | None = None
        self._waiting: dict[int, Routed] = {}
        self._like: Tensor | None = None
        self._products: dict[int, Tensor] = {}
        names = job.plan.names
        self._replaced = {names.resolve(m.entry) for m in job.plan.matrices}
        self._expert_of: dict[Site, tuple[int, int]] = {}  # (number, of how many)
        for part in job.plan.units:
            if part.parent is not None and part.is_stacked:
                for entry in part.entries:
                    for number in part.experts or ():
                        self._expert_of[Site(entry, number)] = number, part.count

    def _check_joined(self, exporter: Exporter) -> None:
        """Refuse what needs more of all ranks than they tell each other.

        Raises:
            RecipeError: It says what, and how the run can be made.
        """
        recipe = self._job.plan.recipe
        if self._stacks and exporter.sequential:
            raise RecipeError(
                f"{recipe.name} runs layers again with what they have become, and the experts of "
                "this model are one tensor, which several ranks do not do; run it in one process, "
                "or give ep=1 (--ep 1)"
            )
        if exporter.rounded:
            raise RecipeError(
                f"{recipe.name} with numerics='modelopt' runs all batches a second time with "
                "rounded inputs, which several ranks do not do; run it in one process, or with "
                "exact numerics"
            )
        if recipe.algorithm.sets_inputs:
            raise RecipeError(
                f"{recipe.name} chooses scales of inputs from the spread of all batches, "
                "which several ranks do not join; run it in one process"
            )
        if self._evidence.cache.affine and self._job.plan.kv_cache:
            raise RecipeError(
                "a KV cache with biases takes means over all batches in their order, which several "
                "ranks do not have; run it in one process, or choose kv_cache: fp8"
            )

    def batches(self, batches: Sequence[Tensor]) -> dict[int, Tensor]:
        """Return this rank's share, or the first batch where it has none."""
        return {number: batches[number] for number in self._own or (0,)}

    def visit(self, site: Site, x: Tensor, batched: bool) -> None:
        """Take into account what enters a weight."""
        self._inputs.visit(site, x, batched)
        if not self._evidence.statistics.wants(site):
            return
        if site in self._expert_of and self._degrees.edp == 1:  # all batches come here, in order
            self._evidence.statistics.visit(site, x, batched)
            return
        assert self._streamed is not None
        batch = self._streamed.current if self._batch is None else self._batch
        self._log.setdefault(batch, []).append((site, x.detach().clone(), batched))

    def visit_cache(self, module: str, key: Tensor, value: Tensor) -> None:
        """Take keys and values into account."""
        if not self.silent:
            self._cache.visit(module, key, value)

    def export(
        self, unit: Unit, sources: Mapping[str, Tensor], amax: Mapping[str, Tensor]
    ) -> list[str]:
        """Export this rank's experts; on rank 0, what is no expert's, too."""
        first = self._team.is_first
        if unit.of_stack:
            return []  # made of the whole tensor
        if unit.name in self._stacks and first:
            read = ReadStacks(sources, self._job)
            return self._exporter.export(unit, read, AmaxOnDemand(amax, read))
        if unit.name in self._stacks:
            return []
        if not self._searches:
            writes = first if unit.parent is None else self._degrees.writes(self._team.rank)
            return self._exporter.export(unit, sources, amax) if writes else []
        if self._jointly:
            return self._exporter.export(unit, sources, amax) if first else []
        parts = [u.name for u in self._job.own_units if u.parent == unit.name]
        own = [unit.name, *parts] if first else parts
        return self._exporter.export(unit, sources, amax, own=own)

    def replace(self, loaded: Loaded) -> None:
        """Put what a layer has become on rank 0, without its parts, into the model of each."""
        if self._team.is_first:
            self._exporter.replace(loaded)
        entries = [e for e in loaded.buffers if e in self._replaced]
        values = self._team.decide(
            f"{loaded.unit.name}: quantized", lambda: [loaded.buffers[e].cpu() for e in entries]
        )
        for entry, value in zip(entries, values, strict=True):
            loaded.buffers[entry].copy_(value)

    def everyone(self, what: str, value: Any) -> list[Any]:
        """Return what each rank gives; see `Team.everyone`."""
        return self._team.everyone(what, value)

    @property
    def peak_weights(self) -> int:
        """The most bytes of weights that were in memory at a time."""
        return self._streamed.peak if self._streamed is not None else 0

    @contextmanager
    def sending(self, streamed: StreamedModel, watch: InputWatch) -> Iterator[None]:
        """Have rows sent to their experts."""
        self._streamed, self._watch = streamed, watch
        if not self._containers:
            yield
            return
        names = {id(self._job.model.get_submodule(path)): path for path in self._containers}

        def post(module: nn.Module, routed: Routed) -> Tensor:
            number = streamed.current
            self._like = routed.hidden[:0]
            if not self.silent:
                self._waiting[number] = routed
            streamed.want(f"{names[id(module)]}{_STATION}")
            if self.silent:
                return torch.zeros_like(routed.hidden[routed.tokens])
            return self._products.pop(number)

        with sent_experts(self._job.model, list(self._containers), post):
            yield

    def serve(self, station: str) -> None:
        """Run this rank's experts on the rows of all ranks of its group."""
        path = station.removesuffix(_STATION)
        streamed, watch, model = self._streamed, self._watch, self._job.model
        assert streamed is not None
        assert watch is not None
        assert self._like is not None
        requests, self._waiting = dict(sorted(self._waiting.items())), {}
        count = self._sizes[path]
        exchange = Exchange(
            self._team, self._degrees, station, self._count, count, requests, self._like
        )
        own = expert_forward(model.get_submodule(path))
        first = self._degrees.experts_of(self._team.rank, count).start
        for part in self._containers[path]:
            with streamed.inside(part.name), streamed.rows, watch, model_code(model):
                for arrived in exchange.arrived:
                    self._batch = arrived.batch
                    _run_part(own, part, first, arrived)
        self._batch = None
        self._products = exchange.returned()

    def learn(self, unit: Unit) -> None:
        """Join what all ranks saw of a unit, and, of a layer, its experts."""
        if unit.parent is not None:
            return
        self._gather()
        sites = self._exporter.sites(unit)
        self._bring_together(unit)
        seen, self._inputs = self._inputs, InputStats()
        amax = self._largest([seen.amax.get(site) for site in sites])
        rows = self._team.total(torch.tensor([seen.rows.get(site, 0) for site in sites]))
        inputs = self._evidence.inputs
        for site, value, count in zip(sites, amax, rows.tolist(), strict=True):
            if value is not None:
                before = inputs.amax.get(site, value)
                inputs.amax[site] = torch.maximum(before, value)
            if count or value is not None:
                inputs.rows[site] = inputs.rows.get(site, 0) + count
        self._learn_caches(unit)

    def _gather(self) -> None:
        """Hand what was seen to the ranks that sum it up, batch by batch in their order."""
        statistics, team = self._evidence.statistics, self._team
        if not self._searches:
            return
        log, self._log = self._log, {}
        for start in range(0, self._count, team.world_size):
            sent: list[list[Any]] = [[] for _ in range(team.world_size)]
            for batch in range(start, min(start + team.world_size, self._count)):
                for site, x, batched in log.pop(batch, ()):
                    for rank in self._summing(site):
                        sent[rank].append((batch, site, x.cpu(), batched))
            received = [item for part in team.send(f"inputs from {start}", sent) for item in part]
            for _, site, x, batched in sorted(received, key=lambda item: int(item[0])):
                statistics.visit(site, x.to(self._job.device), batched)

    def _summing(self, site: Site) -> list[int]:
        """The ranks that keep the statistics of a site: rank 0, or whoever has the expert."""
        if site not in self._expert_of:
            return [0]
        number, count = self._expert_of[site]
        groups = range(0, self._team.world_size, self._degrees.ep)
        return [self._degrees.owner(number, count, first) for first in groups]

    def _bring_together(self, unit: Unit) -> None:
        """Give rank 0 the statistics of a layer's experts, where it chooses for all of them."""
        if not self._searches or not (self._jointly or unit.name in self._stacks):
            return
        statistics = self._evidence.statistics
        here = [site for site in self._exporter.searched(unit) if site in self._expert_of]
        found = {site: seen for site in here if (seen := statistics.at(site)) is not None}
        writes = self._degrees.writes(self._team.rank)
        for seen_there in self._team.collect(f"{unit.name}: statistics", found if writes else {}):
            for site, seen in seen_there.items():
                statistics.put(site, seen)
        if not self._team.is_first:
            statistics.drop(here)

    def _learn_caches(self, unit: Unit) -> None:
        modules = [kv.module for kv in self._job.plan.kv_cache if kv.unit == unit.name]
        seen, self._cache = self._cache, CacheStats()
        cache = self._evidence.cache
        for own, joined in ((seen.key, cache.key), (seen.value, cache.value)):
            found = [own[name].amax if name in own else None for name in modules]
            for name, value in zip(modules, self._largest(found), strict=True):
                if value is not None:
                    joined.setdefault(name, cache.empty()).add(value.view(1, 1))

    def _largest(self, values: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Return the largest of each over all ranks, in the dtype that whoever saw it has.

        A NaN counts as infinity: both end the run.
        """
        if not values:
            return []
        table = torch.full((len(values), 2), -1.0, dtype=torch.float64)
        for row, value in zip(table, values, strict=True):
            if value is not None:
                row[0] = torch.nan_to_num(value.double(), nan=torch.inf, posinf=torch.inf)
                row[1] = _DTYPES.index(value.dtype)
        found = self._team.largest(table).tolist()
        device = self._job.device
        return [
            None if kind < 0 else torch.tensor(amax, dtype=_DTYPES[int(kind)], device=device)
            for amax, kind in found
        ]


def _run_part(own: Callable[..., Tensor], part: Unit, first: int, arrived: Arrived) -> None:
    """Run the experts of a part on the rows of one batch."""
    assert part.experts is not None
    inside = slice(part.experts.start - first, part.experts.stop - first)
    start, counts = int(arrived.counts[: inside.start].sum()), arrived.counts[inside]
    place = slice(start, start + int(counts.sum()))
    if place.start == place.stop:
        return
    rows_SH = arrived.rows[place]
    numbers = torch.arange(part.experts.start, part.experts.stop).repeat_interleave(counts)
    arrived.products[place] = products(own, rows_SH, numbers.to(rows_SH.device))
