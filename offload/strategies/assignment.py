"""Assignment strategies: which of the blocks each transfer uses, from the transfers' sizes alone.

They know no times: a strategy that has times scores several assignments with the simulator.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

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
            if len(sizes) <= _EXHAUSTIVE_LABELS and count <= _EXHAUSTIVE_BLOCKS:
                options: Iterator[list[int]] = _alternating(len(sizes), count)
            else:
                options = iter([_least_growth(sizes, count)])
            for option in options:
                score = self.score(sizes, option, count)
                if best is None or score > best[0]:
                    best = (score, option)
        # With one block, or fewer transfers than blocks, there may be no option: take them in turn.
        return best[1] if best else [i % n_blocks for i in range(len(sizes))]

    def score(self, sizes: Sequence[int], assignment: Sequence[int], count: int) -> float:
        """Return what is maximised, for an assignment to ``count`` blocks."""
        largest, first, last, uses = [0] * count, [-1] * count, [0] * count, 0
        for i, (block, size) in enumerate(zip(assignment, sizes, strict=True)):
            largest[block] = max(largest[block], size)
            if first[block] < 0:
                first[block] = i
            else:
                uses += 1
            last[block] = i
        span = sum(b - a for a, b in zip(first, last, strict=True) if a >= 0)
        distance = span / uses if uses else float(count)
        saved = 1 - sum(largest) / sum(sizes) if sum(sizes) else 0.0
        weight = self.distribution_weight
        return (1 - weight) * saved + weight * min(distance / count, 1.0)


def _check(sizes: Sequence[int], n_blocks: int) -> None:
    if n_blocks < 1:
        raise ValueError(f"n_blocks is {n_blocks}; there must be at least one block")
    if any(size < 0 for size in sizes):
        raise ValueError("sizes must not be negative")


def _alternating(length: int, count: int) -> Iterator[list[int]]:
    """Yield every assignment that uses ``count`` blocks (or one each), no two in a row the same.

    Blocks are numbered by first use, which leaves out mere renumberings.
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

    yield from grow(0)


def _least_growth(sizes: Sequence[int], count: int) -> list[int]:
    """Fill empty blocks first, then the one that grows least; the last avoids the first one's block."""
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
