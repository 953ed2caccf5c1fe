"""All that calibration saw, and its form in a journal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from modelopt_lite.calibrate.attention import CacheStats
from modelopt_lite.calibrate.observe import InputStats, Site


@dataclass(slots=True)
class Evidence:
    """What calibration saw."""

    inputs: InputStats = field(default_factory=InputStats)
    cache: CacheStats = field(default_factory=CacheStats)

    def to_json(self, sites: Iterable[Site], modules: Iterable[str]) -> dict[str, Any]:
        """Return, as JSON values, what was seen at some sites and attention modules."""
        amax, rows = self.inputs.amax, self.inputs.rows
        return {
            "inputs": [
                [s.entry, s.expert, rows[s], _scalar(amax[s]) if s in amax else None]
                for s in sites
                if s in rows
            ],
            "cache": {
                name: [_scalar(self.cache.key[name]), _scalar(self.cache.value[name])]
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
            self.cache.key[name] = _tensor(key)
            self.cache.value[name] = _tensor(value)


def _scalar(value: Tensor) -> list[Any]:
    """A 0-d tensor as number and dtype; a float64 holds every value of the narrower types."""
    return [value.item(), str(value.dtype).removeprefix("torch.")]


def _tensor(scalar: list[Any]) -> Tensor:
    number, dtype = scalar
    return torch.tensor(number, dtype=getattr(torch, dtype))
