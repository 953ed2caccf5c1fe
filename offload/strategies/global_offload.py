"""One fill for all labels: each offloads what a common share of its window can copy."""

from __future__ import annotations

from dataclasses import dataclass, field

from modelopt_lite.offload.strategies.assignment import (
    AssignmentStrategy,
    OptimizedRoundRobinAssignment,
)
from modelopt_lite.offload.strategies.choosing import ChoosingStrategy, check_blocks
from modelopt_lite.offload.strategies.problem import Choice, Problem
from modelopt_lite.offload.strategies.search import block_counts, fills, with_blocks


@dataclass(frozen=True, slots=True)
class GlobalOffloadStrategy(ChoosingStrategy):
    """The best of a few dozen fills, with blocks from an assignment strategy.

    A fill is a part of every label, or a share of the window that the previous label's compute
    time is. Fast and regular: labels that are alike offload alike.

    Args:
        n_blocks: Most blocks.
        scale: As in `KnapsackStrategy`.
        min_blocks: Fewest blocks, as far as labels, the budget and the least stall allow.
        max_blocks: Most blocks, where below ``n_blocks``.
        assignment_strategy: Distributes the labels over the blocks.
        threshold_mb: Tensors below so many MiB stay resident, unless the budget needs them.
    """

    n_blocks: int = 4
    scale: float = 1.0
    min_blocks: int = 1
    max_blocks: int | None = None
    assignment_strategy: AssignmentStrategy = field(
        default_factory=lambda: OptimizedRoundRobinAssignment(min_blocks=2, max_blocks=4)
    )
    threshold_mb: float = 0.1

    def __post_init__(self) -> None:
        check_blocks(self.min_blocks, self._most())

    def _most(self) -> int:
        return self.n_blocks if self.max_blocks is None else min(self.n_blocks, self.max_blocks)

    def _bus(self) -> tuple[float, bool]:
        return self.scale, True

    def choose(self, problem: Problem) -> Choice:
        """Return the best choice for a problem whose budget can be met."""
        choices = [problem.nothing()]
        for levels in dict.fromkeys(fills(problem)):
            without_first = (0, *levels[1:])[: len(levels)]
            for count in block_counts(problem, self._most()):
                for vector in (levels, without_first):
                    choices.append(with_blocks(problem, vector, self.assignment_strategy, count))
        return problem.best(choices)
