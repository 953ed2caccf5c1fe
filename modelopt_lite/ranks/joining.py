"""What one rank saw of a layer, and how it becomes what one process would have seen.

Largest magnitudes are joined over all ranks. What is summed, or sampled, goes batch by batch to the
rank that keeps it, which takes it in the order of the batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from modelopt_lite.calibrate.observe import InputStats, Site
from modelopt_lite.calibrate.statistics import Seen
from modelopt_lite.export.exporter import Exporter
from modelopt_lite.job import Job
from modelopt_lite.offload.units import Unit
from modelopt_lite.parallel.team import Team
from modelopt_lite.sharding import expert_sites

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class Joining:
    """What this rank saw since the last layer.

    Args:
        team: The ranks.
        job: What this one does.
        exporter: Its evidence gets what all have seen.
        batches: How many batches the run has.

    Attributes:
        expert_of: Site of a sharded expert -> its number, and how many its container has.
    """

    def __init__(self, team: Team, job: Job, exporter: Exporter, batches: int) -> None:
        assert job.degrees is not None
        self._team, self._job, self._degrees = team, job, job.degrees
        self._count = batches
        self._exporter, self._evidence = exporter, exporter.evidence
        self._inputs = InputStats()
        self._log: dict[int, list[tuple[Any, ...]]] = {}
        self._logs = exporter.searches or bool(job.plan.kv_cache)
        self.expert_of = expert_sites(job)

    def visit(self, batch: int, site: Site, x: Tensor, batched: bool) -> None:
        """Take into account what enters a weight in a pass of a batch."""
        self._inputs.visit(site, x, batched)
        if not self._evidence.statistics.wants(site):
            return
        if site in self.expert_of and self._degrees.edp == 1:  # all batches come here, in order
            self._evidence.statistics.visit(site, x, batched)
            return
        self._log.setdefault(batch, []).append((site, x.detach().clone(), batched))

    def visit_cache(self, batch: int, module: str, key: Tensor, value: Tensor) -> None:
        """Take keys and values into account."""
        parts = [self._evidence.cache.part(x.detach()) for x in (key, value)]
        self._log.setdefault(batch, []).append((module, *parts))

    def learn(self, unit: Unit, *, together: bool) -> None:
        """Join what all ranks saw of a layer and its experts; every rank calls it.

        Args:
            unit: The layer, or another unit that is part of none.
            together: Rank 0 needs the statistics of all experts.
        """
        self._gather()
        sites = self._exporter.sites(unit)
        if together:
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

    def _gather(self) -> None:
        """Hand what was seen to the ranks that sum it up, batch by batch in their order."""
        if not self._logs:
            return
        log, self._log = self._log, {}
        size = self._team.world_size
        for start in range(0, self._count, size):
            sent: list[list[Any]] = [[] for _ in range(size)]
            for batch in range(start, min(start + size, self._count)):
                for where, *seen in log.pop(batch, ()):
                    for rank in self._summing(where):
                        sent[rank].append((batch, where, *moved(tuple(seen), "cpu")))
            parts = self._team.send(f"seen from {start}", sent)
            received = [item for part in parts for item in part]
            for _, where, *seen in sorted(received, key=lambda item: int(item[0])):
                self._take(where, *seen)

    def _take(self, where: Site | str, *seen: Any) -> None:
        seen = moved(seen, self._job.device)
        if isinstance(where, Site):
            self._evidence.statistics.visit(where, *seen)
        else:
            self._evidence.cache.take(where, *seen)

    def _summing(self, where: Site | str) -> list[int]:
        """The ranks that keep what is summed: rank 0, or whoever has the expert."""
        if isinstance(where, str) or where not in self.expert_of:
            return [0]
        number, count = self.expert_of[where]
        groups = range(0, self._team.world_size, self._degrees.ep)
        return [self._degrees.owner(number, count, first) for first in groups]

    def _bring_together(self, unit: Unit) -> None:
        statistics = self._evidence.statistics
        here = [site for site in self._exporter.searched(unit) if site in self.expert_of]
        found = {site: seen for site in here if (seen := statistics.at(site)) is not None}
        writes = self._degrees.writes(self._team.rank)
        for seen_there in self._team.collect(f"{unit.name}: statistics", found if writes else {}):
            for site, seen in seen_there.items():
                statistics.put(site, seen)
        if not self._team.is_first:
            statistics.drop(here)

    def tell(self, unit: Unit) -> None:
        """Tell all ranks of what entered a layer's matrices, but for the rows that were kept."""
        statistics = self._evidence.statistics
        known = {
            site: _channels(seen, "cpu")
            for site in self._exporter.searched(unit)
            if (seen := statistics.at(site)) is not None
        }
        told = known if self._degrees.writes(self._team.rank) else {}
        for found in self._team.everyone(f"{unit.name}: channels", told):
            for site, seen in found.items():
                if site not in known:
                    statistics.put(site, _channels(seen, self._job.device))

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


def _channels(seen: Seen, device: torch.device | str) -> Seen:
    """Return what is known of channels."""
    amax, mean, total = (moved(part, device) for part in (seen.amax, seen.mean, seen.sum))
    return Seen(seen.calls, seen.count, amax, mean, total)


def moved(value: Any, device: torch.device | str) -> Any:
    """Return a value with the tensors in it on a device."""
    if isinstance(value, tuple):
        return tuple(moved(part, device) for part in value)
    if isinstance(value, dict):
        return {key: moved(part, device) for key, part in value.items()}
    return value.to(device) if isinstance(value, Tensor) else value
