"""What a rank of several does of a run, and what it learns from the others.

All ranks walk the same units in lockstep, each with its own batches; they meet where rows go to
their experts, and where a unit is finished: there the evidence of all becomes one, each rank writes
its experts, and rank 0 the rest. A rank without batches follows the first batch, unheard.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from modelopt_lite.calibrate.algorithm import Weight
from modelopt_lite.calibrate.model_code import model_code
from modelopt_lite.calibrate.observe import InputWatch, Site
from modelopt_lite.errors import InternalError
from modelopt_lite.export.exporter import Exporter
from modelopt_lite.export.made import Made
from modelopt_lite.export.treat import Sharing
from modelopt_lite.job import Job
from modelopt_lite.offload.store import Loaded
from modelopt_lite.offload.stream import StreamedModel
from modelopt_lite.offload.units import Unit
from modelopt_lite.parallel.experts import (
    Arrived,
    Exchange,
    Routed,
    expert_products,
    sent_experts,
)
from modelopt_lite.parallel.team import Team
from modelopt_lite.plan import Matrix
from modelopt_lite.ranks.joining import Joining, moved
from modelopt_lite.ranks.stacks import AmaxOnDemand, ReadStacks
from modelopt_lite.sharding import stacked_layers

Inputs = Mapping[str, Tensor]
"""A model's arguments for one batch."""

_STATION = "#experts"


class Alone:
    """A run of one process: it sees and writes all."""

    stations: Mapping[str, Sequence[str]] = {}
    silent = False  # whether nobody listens to this rank's passes

    def __init__(self, exporter: Exporter) -> None:
        self._exporter = exporter
        self._evidence = exporter.evidence

    def batches(self, batches: Sequence[Inputs]) -> dict[int, Inputs]:
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

    def choose(self, unit: Unit, sources: Mapping[str, Tensor]) -> None:
        """Choose with other processes what becomes of a unit, where that is done together."""

    def export(
        self, unit: Unit, sources: Mapping[str, Tensor], amax: Mapping[str, Tensor]
    ) -> list[str]:
        """Export what is this process's of a unit; see `Exporter.export`."""
        return self._exporter.export(unit, sources, amax)

    def replace(self, loaded: Loaded) -> None:
        """Put what a layer without its parts has become into the model."""
        self._exporter.replace(loaded)

    def replace_part(self, loaded: Loaded) -> None:
        """Put what some experts of that layer have become into the model."""
        self._exporter.replace(loaded)

    def forget(self) -> None:
        """Let go of what that layer has become."""
        self._exporter.forget()

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
        self._searches = exporter.searches
        recipe = job.plan.recipe
        self._jointly = job.plan.numerics == "modelopt"  # rank 0 chooses for all experts of a layer
        self._smooths = recipe.algorithm.smooths and not self._jointly  # all ranks do, together
        self._sets_inputs = recipe.algorithm.sets_inputs
        self._stacks = stacked_layers(job)
        self._joining = Joining(team, job, exporter, batches)
        self._made: list[Made] | None = None  # what rank 0 says that this rank's experts became
        self._batch: int | None = None  # whose rows experts run on
        self._containers: dict[str, list[Unit]] = {}
        self._owners: dict[str, int] = {}  # of parts
        self._sizes: dict[str, int] = {}
        stations: dict[str, list[str]] = {}
        for unit in job.plan.units:
            if unit.parent is None:
                continue
            if unit.experts:
                self._owners[unit.name] = self._degrees.owner(unit.experts.start, unit.count, 0)
            if self._degrees.ep == 1:  # parts for want of memory; no rows are sent
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

    def batches(self, batches: Sequence[Inputs]) -> dict[int, Inputs]:
        """Return this rank's share, or the first batch where it has none."""
        return {number: batches[number] for number in self._own or (0,)}

    def visit(self, site: Site, x: Tensor, batched: bool) -> None:
        """Take into account what enters a weight."""
        assert self._streamed is not None
        batch = self._streamed.current if self._batch is None else self._batch
        self._joining.visit(batch, site, x, batched)

    def visit_cache(self, module: str, key: Tensor, value: Tensor) -> None:
        """Take keys and values into account."""
        if not self.silent:
            assert self._streamed is not None
            self._joining.visit_cache(self._streamed.current, module, key, value)

    def choose(self, unit: Unit, sources: Mapping[str, Tensor]) -> None:
        """Choose scales that all experts of a layer share, each rank by its own experts."""
        if not self._smooths or unit.parent is not None or unit.name in self._stacks:
            return
        shared = Sharing(self._team.rank, self._owner, self._each)
        treated = self._exporter.choose(unit, sources, shared)
        for found in self._team.collect(
            f"{unit.name}: inputs", moved(treated.chosen_inputs(), "cpu")
        ):
            treated.take_inputs(found)

    def _owner(self, matrix: Matrix) -> int:
        """The rank that exports a matrix: of those that hold an expert the first, else rank 0."""
        return self._owners.get(matrix.unit, 0)

    def _each(self, weights: Sequence[Weight], work: Callable[[Weight], Any]) -> list[Any]:
        """Have each rank do the work for its own matrices, and tell the others what it gave."""
        own = {n: moved(work(w), "cpu") for n, w in enumerate(weights) if w.own}
        found: dict[int, Any] = {}
        for told in self._team.everyone("choose", own):
            found.update(told)
        return [moved(found[n], self._job.device) for n in range(len(weights))]

    def export(
        self, unit: Unit, sources: Mapping[str, Tensor], amax: Mapping[str, Tensor]
    ) -> list[str]:
        """Export this rank's experts; on rank 0, what is no expert's, too."""
        first = self._team.is_first
        if unit.parent in self._stacks:
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
        if self._smooths and not self._degrees.writes(self._team.rank):
            parts = []  # whoever chose for them writes them
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
        if self._jointly or loaded.unit.name in self._stacks:
            self._made = self._team.send(f"{loaded.unit.name}: experts", self._deal(loaded.unit))[0]

    def _deal(self, unit: Unit) -> list[list[Made]]:
        """On rank 0, return for each rank what its experts of a layer have become."""
        dealt: list[list[Made]] = [[] for _ in range(self._team.world_size)]
        if not self._team.is_first:
            return dealt
        expert_of = self._joining.expert_of
        parts = [part.name for part in self._job.plan.units if part.parent == unit.name]
        for made in self._exporter.made([unit.name, *parts]):
            whole = Site(made.entry) in expert_of  # a module of its own
            for one in [made] if made.region or whole else _experts_of(made):
                first = one.region[0] if one.region else None
                site = Site(one.entry, first if isinstance(first, int) else None)
                if site not in expert_of:
                    continue
                number, count = expert_of[site]
                # A view would be sent with all that it is a view of.
                alone = replace(one, value=one.value.cpu().clone())
                for rank, of_rank in enumerate(dealt):
                    if number in self._degrees.experts_of(rank, count):
                        of_rank.append(alone)
        return dealt

    def replace_part(self, loaded: Loaded) -> None:
        """Put what some experts of a layer have become into the model."""
        if self._made is None:
            self._exporter.replace(loaded)
            return
        experts = loaded.unit.experts or ()
        for made in self._made:
            stacked = loaded.unit.is_stacked
            if made.entry in loaded.buffers and (not stacked or made.region[0] in experts):
                made.put_into(loaded)

    def forget(self) -> None:
        """Let go of what a layer has become."""
        self._exporter.forget()
        self._made = None

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

        model = self._job.model

        @cache
        def entries_of(block: str) -> list[str]:
            return [n for n, _ in model.named_parameters() if n.startswith(f"{block}.")]

        def unseen(block: str) -> AbstractContextManager[None]:
            return watch.pausing(entries_of(block))

        with sent_experts(model, list(self._containers), post, unseen):
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
        own = expert_products(model.get_submodule(path))
        first = self._degrees.experts_of(self._team.rank, count).start
        for part in self._containers[path]:
            with (
                streamed.inside(part.name),
                streamed.rows,
                self._job.products(),
                watch,
                model_code(model),
            ):
                for arrived in exchange.arrived:
                    self._batch = arrived.batch
                    _run_part(own, part, first, arrived)
        self._batch = None
        self._products = exchange.returned()

    def learn(self, unit: Unit) -> None:
        """Join what all ranks saw of a unit, and, of a layer, its experts."""
        if unit.parent is None:
            together = self._jointly or self._sets_inputs or unit.name in self._stacks
            self._joining.learn(unit, together=self._searches and together)
            if self._smooths and unit.name not in self._stacks:
                self._joining.tell(unit)


def _experts_of(made: Made) -> Iterator[Made]:
    """Yield each expert of what is all of a stack; nothing of what is no stack."""
    if made.value.ndim == 3:
        for number, value in enumerate(made.value):
            yield Made(made.entry, (number,), made.inner, value)


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
    arrived.products[place] = own(rows_SH, numbers.to(rows_SH.device))
