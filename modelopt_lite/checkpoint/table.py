"""Where a checkpoint's tensors lie, in some tens of bytes for each.

A large model has hundreds of thousands of tensors, and a run keeps two such tables, of what it
reads and of what it writes: as objects they would be the one part of its memory that grows with
depth. Names share their beginnings and their ends, tensors their shapes; the rest is arrays.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import ItemsView, Iterable, Iterator, Mapping, ValuesView
from pathlib import Path

import torch

from modelopt_lite.checkpoint.header import TensorInfo

_TAIL_BITS = 32
_TAIL = (1 << _TAIL_BITS) - 1


class TensorTable(Mapping[str, TensorInfo]):
    """Name -> tensor, in the order in which they were given; a `TensorInfo` is made when asked for.

    Args:
        tensors: What it holds; those of one file follow one another.

    Attributes:
        files: The files that hold them, in order; may be renamed as long as they are as many.

    Raises:
        ValueError: Two tensors have one name, which is the argument.
    """

    def __init__(self, tensors: Iterable[TensorInfo] = ()) -> None:
        self.files: list[Path] = []
        self._first: list[int] = []  # tensor of each file
        self._kinds: dict[tuple[torch.dtype, tuple[int, ...]], int] = {}
        self._kind = array("I")
        self._start, self._end = array("Q"), array("Q")
        heads: dict[str, int] = {}
        tails: dict[str, int] = {}
        self._key = array("Q")
        for info in tensors:
            if not self.files or self.files[-1] != info.file:
                self.files.append(info.file)
                self._first.append(len(self._key))
            head, tail = _halves(info.name)
            number = heads.setdefault(head, len(heads)) << _TAIL_BITS
            self._key.append(number | tails.setdefault(tail, len(tails)))
            kind = (info.dtype, info.shape)
            self._kind.append(self._kinds.setdefault(kind, len(self._kinds)))
            self._start.append(info.start)
            self._end.append(info.end)
        self._heads, self._tails = heads, tails
        self._head_of, self._tail_of, self._kind_of = [*heads], [*tails], [*self._kinds]
        order = sorted(range(len(self._key)), key=self._key.__getitem__)
        self._order = array("I", order)
        self._sorted = array("Q", map(self._key.__getitem__, order))
        for before, number in enumerate(order[1:]):
            if self._sorted[before] == self._key[number]:
                raise ValueError(self.name(number))

    def find(self, name: str) -> int | None:
        """Return the number of a tensor, or None where there is none of that name."""
        head, tail = _halves(name)
        first, last = self._heads.get(head), self._tails.get(tail)
        if first is None or last is None:
            return None
        key = first << _TAIL_BITS | last
        at = bisect_left(self._sorted, key)
        return self._order[at] if at < len(self._sorted) and self._sorted[at] == key else None

    def name(self, number: int) -> str:
        """Return the name of the tensor of a number."""
        key = self._key[number]
        return self._head_of[key >> _TAIL_BITS] + self._tail_of[key & _TAIL]

    def at(self, number: int) -> TensorInfo:
        """Return the tensor of a number, from 0."""
        dtype, shape = self._kind_of[self._kind[number]]
        file = self.files[bisect_right(self._first, number) - 1]
        start, end = self._start[number], self._end[number]
        return TensorInfo(self.name(number), dtype, shape, file, start, end)

    def of_file(self, file: int) -> range:
        """Return the numbers of the tensors of a file, which is given by its place in ``files``."""
        ends = [*self._first[1:], len(self)]
        return range(self._first[file], ends[file])

    def __getitem__(self, name: str) -> TensorInfo:
        number = self.find(name)
        if number is None:
            raise KeyError(name)
        return self.at(number)

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self.find(name) is not None

    def __iter__(self) -> Iterator[str]:
        return map(self.name, range(len(self._key)))

    def __len__(self) -> int:
        return len(self._key)

    def values(self) -> ValuesView[TensorInfo]:
        """Return the tensors in order."""
        return _Values(self)

    def items(self) -> ItemsView[str, TensorInfo]:
        """Return names and tensors in order."""
        return _Items(self)


class _Values(ValuesView[TensorInfo]):
    """Without a search for each name."""

    def __init__(self, table: TensorTable) -> None:
        super().__init__(table)
        self._table = table

    def __iter__(self) -> Iterator[TensorInfo]:
        return map(self._table.at, range(len(self._table)))


class _Items(ItemsView[str, TensorInfo]):
    def __init__(self, table: TensorTable) -> None:
        super().__init__(table)
        self._table = table

    def __iter__(self) -> Iterator[tuple[str, TensorInfo]]:
        return ((info.name, info) for info in self._table.values())


def _halves(name: str) -> tuple[str, str]:
    """Split a name before its last two parts: ``…experts.3.`` and ``gate_proj.weight``."""
    cut = name.rfind(".", 0, max(name.rfind("."), 0)) + 1
    return name[:cut], name[cut:]
