"""Export stacks of experts whose rows lie on several ranks: rank 0 reads each in full, once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor

from modelopt_lite.export.quantize import check_finite
from modelopt_lite.export.sources import ReadThrough
from modelopt_lite.job import Job


class ReadStacks(ReadThrough):
    """A layer's tensors; stacks of experts are read from the source, once, and kept."""

    def __init__(self, inside: Mapping[str, Tensor], job: Job) -> None:
        super().__init__(inside, job.source)
        self._device = job.device
        self._read: dict[str, Tensor] = {}

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._read:
            self._read[name] = super().__getitem__(name).to(self._device)
        return self._read[name]


class AmaxOnDemand(Mapping[str, Tensor]):
    """Largest magnitudes; of what was not looked at, when it is asked for."""

    def __init__(self, known: Mapping[str, Tensor], sources: Mapping[str, Tensor]) -> None:
        self._known, self._sources = dict(known), sources

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._known:
            self._known |= check_finite({name: self._sources[name]})
        return self._known[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._known)

    def __len__(self) -> int:
        return len(self._known)
