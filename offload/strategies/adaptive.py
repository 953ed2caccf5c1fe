"""The default: the best that any of the other strategies finds."""

from __future__ import annotations

from dataclasses import dataclass

from modelopt_lite.offload.strategies.assignment import (
    OptimizedRoundRobinAssignment,
    StrictRoundRobinAssignment,
)
from modelopt_lite.offload.strategies.choosing import ChoosingStrategy, check_blocks
from modelopt_lite.offload.strategies.global_offload import GlobalOffloadStrategy
from modelopt_lite.offload.strategies.knapsack import KnapsackStrategy
from modelopt_lite.offload.strategies.problem import Choice, Problem
from modelopt_lite.offload.strategies.tensor_selection import GlobalTensorSelectionStrategy


@dataclass(frozen=True, slots=True)
class AdaptiveStrategy(ChoosingStrategy):
    """Compare the strategies on the simulator and take the best.

    Args:
        scale: As in `KnapsackStrategy`; ``transfer_budget_scale`` of the configuration.
        n_blocks: Most blocks; ``num_blocks`` of the configuration.
        min_blocks: Fewest blocks, as far as labels, the budget and the least stall allow.
        extra_optimization: Also run `GlobalTensorSelectionStrategy`: slower, seldom better.
        threshold_mb: Tensors below so many MiB stay resident, unless the budget needs them.
    """

    scale: float = 1.0
    n_blocks: int = 4
    min_blocks: int = 1
    extra_optimization: bool = False
    threshold_mb: float = 0.1

    def __post_init__(self) -> None:
        check_blocks(self.min_blocks, self.n_blocks)

    def _bus(self) -> tuple[float, bool]:
        return self.scale, True

    def choose(self, problem: Problem) -> Choice:
        """Return the best choice for a problem whose budget can be met."""
        return problem.best(self._candidates(problem))

    def _candidates(self, problem: Problem) -> list[Choice]:
        optimized = OptimizedRoundRobinAssignment(min(2, self.n_blocks), self.n_blocks)
        found = [
            KnapsackStrategy(n_blocks=self.n_blocks).choose(problem),
            GlobalOffloadStrategy(assignment_strategy=optimized, n_blocks=self.n_blocks).choose(
                problem
            ),
            GlobalOffloadStrategy(
                assignment_strategy=StrictRoundRobinAssignment(), n_blocks=self.n_blocks
            ).choose(problem),
        ]
        if self.extra_optimization:
            found.append(GlobalTensorSelectionStrategy(n_blocks=self.n_blocks).choose(problem))
        return found
