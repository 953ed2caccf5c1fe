"""Assignment strategies: which of the blocks each transfer uses, from the transfers' sizes alone.

They know no times: a strategy that has times scores several assignments with the simulator.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

_EXHAUSTIVE_LABELS = 12
_EXHAUSTIVE_BLOCKS = 4


class AssignmentStrategy(Protocol):
    """Distributes transfers over blocks."""

    def assign(self, sizes: Sequence[int], n_blocks: int) -> list[int]:
        """Return a block id from 0 to ``n_blocks - 1`` for each transfer, in compute order."""


@dataclass(frozen=True, slots=True)
class StrictRoundRobinAssignment:
    """Transfer i uses block i modulo the number of blocks."""

    def assign(self, sizes: Sequence[int], n_blocks: int) -> list[int]:
        """Return ``i % n_blocks`` for each transfer."""
        _check(sizes, n_blocks)
        return [i % n_blocks for i in range(len(sizes))]


@dataclass(frozen=True, slots=True)
class OptimizedRoundRobinAssignment:
    """Trades memory (blocks are as large as their largest transfer) for distance between reuses.

    Maximises ``(1 - w) * (1 - block bytes / transfer bytes) + w * min(distance / blocks, 1)`` with
    w the ``distribution_weight`` and distance the mean number of transfers from one use of a block
    to its next. All blocks are used, and no two transfers in a row share one. Exhaustive up to 12
    transfers and 4 blocks; beyond, each transfer goes to the block that grows least.
    """

    min_blocks: int = 3
    max_blocks: int = 4
    distribution_weight: float = 0.5

    def __post_init__(self) -> None:
        if not 1 <= self.min_blocks <= self.max_blocks:
            raise ValueError(
                f"min_blocks={self.min_blocks}, max_blocks={self.max_blocks}: "
                "needs 1 <= min_blocks <= max_blocks"
            )
        if not 0 <= self.distribution_weight <= 1:
            raise ValueError(
                f"distribution_weight={self.distribution_weight} is not between 0 and 1"
            )

    def assign(self, sizes: Sequence[int], n_blocks: int) -> list[int]:
        """Return the best assignment to ``min_blocks`` .. ``max_blocks`` blocks within n_blocks."""
        _check(sizes, n_blocks)
        best: tuple[float, list[int]] | None = None
        for count in range(min(self.min_blocks, n_blocks), min(self.max_blocks, n_blocks) + 1):
            if count == 1 or (len(sizes) <= _EXHAUSTIVE_LABELS and count <= _EXHAUSTIVE_BLOCKS):
                options = _alternating(len(sizes), count)
            else:
                options = np.array([_least_growth(sizes, count)], dtype=np.int8)
            if not options.size:
                continue
            scores = self._scores(sizes, options, count)
            top = int(scores.argmax())
            if best is None or scores[top] > best[0]:
                best = (float(scores[top]), options[top].tolist())
        # With one block there may be no option without two in a row: take what there is in turn.
        return best[1] if best else [i % n_blocks for i in range(len(sizes))]

    def _scores(
        self, sizes: Sequence[int], options: npt.NDArray[np.int8], count: int
    ) -> npt.NDArray[np.float64]:
        """Return what is maximised, for each row of assignments to ``count`` blocks."""
        memory: Any = np.zeros(len(options))
        span: Any = np.zeros(len(options))
        reuses: Any = np.zeros(len(options))
        place = np.arange(len(sizes))
        for block in range(count):
            used = options == block
            memory += np.where(used, np.array(sizes, dtype=np.float64), 0.0).max(1)
            first = np.where(used, place, len(sizes)).min(1)
            last = np.where(used, place, -1).max(1)
            span += np.where(used.any(1), last - first, 0)
            reuses += np.maximum(used.sum(1) - 1, 0)
        distance = np.where(reuses > 0, span / np.maximum(reuses, 1), float(count))
        saved = 1 - memory / sum(sizes) if sum(sizes) else np.zeros(len(options))
        weight = self.distribution_weight
        result: npt.NDArray[np.float64] = (1 - weight) * saved + weight * np.minimum(
            distance / count, 1.0
        )
        return result


def _check(sizes: Sequence[int], n_blocks: int) -> None:
    if n_blocks < 1:
        raise ValueError(f"n_blocks is {n_blocks}; there must be at least one block")
    if any(size < 0 for size in sizes):
        raise ValueError("sizes must not be negative")


@functools.cache
def _alternating(length: int, count: int) -> npt.NDArray[np.int8]:
    """Return every assignment that uses ``count`` blocks (or one each), no two in a row the same.

    Blocks are numbered by first use, which leaves out mere renumberings. One row each, sorted.
    """
    count = min(count, length)
    prefix: list[int] = []

    def grow(used: int) -> Iterator[list[int]]:
        if len(prefix) == length:
            if used == count:
                yield list(prefix)
            return
        if used + length - len(prefix) < count:
            return
        for block in range(min(used + 1, count)):
            if not prefix or prefix[-1] != block:
                prefix.append(block)
                yield from grow(max(used, block + 1))
                prefix.pop()

    return np.array(list(grow(0)), dtype=np.int8)


def _least_growth(sizes: Sequence[int], count: int) -> list[int]:
    """Fill empty blocks first, then the one that grows least; keep the ends apart."""
    largest: list[int] = []
    result: list[int] = []
    for i, size in enumerate(sizes):
        if len(largest) < count:
            largest.append(size)
            result.append(len(largest) - 1)
            continue
        taken = set(result[-1:])
        if i == len(sizes) - 1 and count > 2:
            taken.add(result[0])
        free = [b for b in range(count) if b not in taken] or list(range(count))
        block = min(free, key=lambda b: max(size - largest[b], 0))
        largest[block] = max(largest[block], size)
        result.append(block)
    return result
