"""The tensors that matrices are taken from, where not all of them are in memory in full."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping

from torch import Tensor

from modelopt_lite.checkpoint.dequant import Source
from modelopt_lite.checkpoint.names import Region


class InParts(Mapping[str, Tensor]):
    """Tensors of which a part may be at hand where the whole is not."""

    @abstractmethod
    def part(self, name: str, region: Region) -> Tensor:
        """Return the part of a tensor that lies at a region of the whole."""


def part_of(sources: Mapping[str, Tensor], name: str, region: Region) -> Tensor:
    """Return a region of a tensor, () for all of it; a view where it is in memory."""
    if isinstance(sources, InParts):
        return sources.part(name, region)
    return sources[name][region] if region else sources[name]


class ReadThrough(InParts):
    """A layer's tensors; those of its parts, which left memory, are read from the source again."""

    def __init__(self, inside: Mapping[str, Tensor], source: Source) -> None:
        self._inside = inside
        self._source = source

    def __getitem__(self, name: str) -> Tensor:
        return self._inside[name] if name in self._inside else self._source.read(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._inside)

    def __len__(self) -> int:
        return len(self._inside)

    def part(self, name: str, region: Region) -> Tensor:
        """See `InParts`; of a stack only the expert is read."""
        first = region[0] if region else None
        if name in self._inside or not isinstance(first, int):
            return self[name][region] if region else self[name]
        rows = self._source.read_rows(name, range(first, first + 1))
        return rows[(0, *region[1:])]


class RowsOfStacks(InParts):
    """Some experts' rows of stacks; there is no whole tensor among them.

    Args:
        rows: Name on disk -> the rows in memory.
        experts: Which of the stack's they are.
    """

    def __init__(self, rows: Mapping[str, Tensor], experts: range) -> None:
        self._rows = rows
        self._experts = experts

    def __getitem__(self, name: str) -> Tensor:
        raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        return iter(())

    def __len__(self) -> int:
        return 0

    def part(self, name: str, region: Region) -> Tensor:
        """See `InParts`; the region begins with one of the experts."""
        first, *inner = region
        assert isinstance(first, int)
        return self._rows[name][(self._experts.index(first), *inner)]
