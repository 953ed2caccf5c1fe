"""All that calibration saw, and its form in a journal."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from modelopt_lite.calibrate.cache import CacheStats
from modelopt_lite.calibrate.observe import InputStats, Site
from modelopt_lite.calibrate.statistics import Statistics


@dataclass(slots=True)
class Evidence:
    """What calibration saw; ``statistics`` only until a layer is finished.

    Attributes:
        numbers: Largest magnitudes that were put away: site -> number and dtype.
    """

    inputs: InputStats = field(default_factory=InputStats)
    cache: CacheStats = field(default_factory=CacheStats)
    statistics: Statistics = field(default_factory=Statistics)
    numbers: dict[Site, list[Any]] = field(default_factory=dict)

    def visit(self, site: Site, x: Tensor, batched: bool) -> None:
        """Take one input into account; an `InputWatch` calls it."""
        self.inputs.visit(site, x, batched)
        self.statistics.visit(site, x, batched)

    def put_away(self, sites: Iterable[Site]) -> None:
        """Keep the largest magnitudes of a finished layer as numbers.

        As a tensor, each is an allocation that stays among temporaries and splits the room of
        larger ones: the heap grew by half a megabyte a layer.
        """
        for site in sites:
            if (seen := self.inputs.amax.pop(site, None)) is not None:
                self.numbers[site] = _scalar(seen)

    def recall(self, sites: Iterable[Site]) -> None:
        """Undo `put_away`, for a layer that passes run through again."""
        for site in sites:
            if (kept := self.numbers.pop(site, None)) is not None:
                self.inputs.amax[site] = _tensor(kept)

    def to_json(self, sites: Iterable[Site], modules: Iterable[str]) -> dict[str, Any]:
        """Return, as JSON values, what was seen at some sites and attention modules."""
        amax, rows = self.inputs.amax, self.inputs.rows
        return {
            "inputs": [
                [s.entry, s.expert, rows[s], _scalar(amax[s]) if s in amax else self.numbers.get(s)]
                for s in sites
                if s in rows
            ],
            "cache": {
                name: [_state(self.cache.key[name]), _state(self.cache.value[name])]
                for name in modules
                if name in self.cache.key
            },
        }

    def add_json(self, data: Mapping[str, Any]) -> None:
        """Take what an earlier run saw, in the place of what was seen there until now."""
        for entry, expert, rows, amax in data["inputs"]:
            site = Site(entry, expert)
            self.inputs.rows[site] = rows
            if amax is not None:
                self.inputs.amax[site] = _tensor(amax)
        for name, (key, value) in data["cache"].items():
            for stats, state in ((self.cache.key, key), (self.cache.value, value)):
                stats[name] = self.cache.empty()
                vars(stats[name]).update(_unpacked(state))


def _scalar(value: Tensor) -> list[Any]:
    """A 0-d tensor as number and dtype; a float64 holds every value of the narrower types."""
    return [value.item(), str(value.dtype).removeprefix("torch.")]


def _tensor(scalar: list[Any]) -> Tensor:
    number, dtype = scalar
    return torch.tensor(number, dtype=getattr(torch, dtype))


def _state(seen: object) -> str:
    """All that an object holds, in text."""
    buffer = io.BytesIO()
    torch.save(vars(seen), buffer)
    return base64.b85encode(buffer.getvalue()).decode()


def _unpacked(state: str) -> dict[str, Any]:
    found: dict[str, Any] = torch.load(io.BytesIO(base64.b85decode(state)), weights_only=True)
    return found
