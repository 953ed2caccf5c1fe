"""Strategies that offload whole labels by a simple rule; the simulator only picks the blocks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from modelopt_lite.offload.strategies.choosing import ChoosingStrategy, check_blocks
from modelopt_lite.offload.strategies.problem import Choice, Problem, Request
from modelopt_lite.offload.strategies.search import assign

_GROWTH = 1.25  # step of the scale by which Greedy reaches for a budget
_STEPS = 64  # 1.25 ** 64 is 1.6 million


@dataclass(frozen=True, slots=True)
class GreedyStrategy(ChoosingStrategy):
    """Offload a label if its copy fits the compute time since the last offloaded label.

    The first label stays resident. With a budget that this does not meet, the scale is raised
    until it does; at the end of that are all labels through one block.
    """

    scale: float = 1.0
    threshold_mb: float = 0.1
    n_blocks: int = 4
    min_blocks: int = 1

    def __post_init__(self) -> None:
        check_blocks(self.min_blocks, self.n_blocks)
        if not self.scale > 0:
            raise ValueError(f"scale is {self.scale}; it must be above 0")

    def choose(self, problem: Problem) -> Choice:
        """Return the choice. Latency mode does not bound the stall that a label adds."""
        chosen = list(self._select(problem, self.scale))
        for step in range(1, _STEPS + 1):
            if problem.budget is None or problem.floor(chosen) <= problem.budget:
                break
            chosen = list(self._select(problem, self.scale * _GROWTH**step))
        else:
            chosen = problem.active
        return _whole(problem, chosen, self.n_blocks)

    def _bus(self) -> tuple[float, bool]:
        return 1.0, False  # the scale is this strategy's own

    def _select(self, problem: Problem, scale: float) -> Iterable[int]:
        spare = 0.0
        for i, duration in enumerate(problem.durations):
            if i in problem.active and problem.copy_ms[i][-1] < spare * scale:
                yield i
                spare = 0.0
            spare += duration


@dataclass(frozen=True, slots=True)
class NthLayerStrategy(ChoosingStrategy):
    """Offload the whole of every ``nth_layer``-th label, but not the first; ignores times."""

    nth_layer: int
    threshold_mb: float = 0.1
    n_blocks: int = 4
    min_blocks: int = 1

    def __post_init__(self) -> None:
        check_blocks(self.min_blocks, self.n_blocks)
        if self.nth_layer < 1:
            raise ValueError(f"nth_layer is {self.nth_layer}; it must be at least 1")

    def choose(self, problem: Problem) -> Choice:
        """Return the choice. Latency mode does not bound the stall that a label adds."""
        return _whole(problem, self._chosen(problem), self.n_blocks)

    def _bus(self) -> tuple[float, bool]:
        return 1.0, False

    def _problem(self, request: Request) -> Problem:
        """Build the problem; where the budget needs them, with the tensors below the threshold."""
        problem = request.problem()
        if problem.budget is not None and self._floor(problem) > problem.budget:
            return Problem(request, threshold=1)
        return problem

    def _floor(self, problem: Problem) -> int:
        return problem.floor(self._chosen(problem))

    def _who(self) -> str:
        return f"{type(self).__name__}(nth_layer={self.nth_layer})"

    def _chosen(self, problem: Problem) -> list[int]:
        return [i for i in problem.active if i % self.nth_layer == 0]


def _whole(problem: Problem, chosen: Sequence[int], n_blocks: int) -> Choice:
    levels = [len(options) - 1 if i in chosen else 0 for i, options in enumerate(problem.levels)]
    return assign(problem, levels, n_blocks)
