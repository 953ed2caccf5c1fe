"""The most thorough search: programs and local changes in turn, on many block assignments."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from modelopt_lite.offload.simulate import NO_BLOCK
from modelopt_lite.offload.strategies.assignment import OptimizedRoundRobinAssignment
from modelopt_lite.offload.strategies.choosing import ChoosingStrategy, check_blocks
from modelopt_lite.offload.strategies.exact import Program, worthwhile
from modelopt_lite.offload.strategies.global_offload import GlobalOffloadStrategy
from modelopt_lite.offload.strategies.knapsack import KnapsackStrategy
from modelopt_lite.offload.strategies.problem import Choice, Problem
from modelopt_lite.offload.strategies.search import assign, improve, with_blocks

_ALL_SHARINGS = 5  # labels up to which every way to share blocks is tried: 52 programs


@dataclass(frozen=True, slots=True)
class GlobalTensorSelectionStrategy(ChoosingStrategy):
    """Choose tensors and blocks together, starting from the other strategies' best.

    Each round solves the exact program for the blocks that the last round ended with, and for
    optimized ones, then improves the outcome by small changes, until a round gains nothing. For up
    to five labels that may be offloaded every way to share blocks is tried: the optimum.

    Args:
        scale: As in `KnapsackStrategy`.
        scale_ub: Latency mode: no stall is accepted beyond what a bus so many times as fast
            would cause; the scale is cut to it.
        pop_size: Accepted, without effect: the search has no population.
        epoch: Most rounds.
        max_early_stop: Rounds without gain after which to stop; each further one would repeat.
        optimizer: Accepted, without effect: "DE" and "SA" name what this search replaces.
        seed: Accepted, without effect: nothing is random.
        threshold_mb: Tensors below so many MiB stay resident, unless the budget needs them.
        n_blocks: Most blocks.
        min_blocks: Fewest blocks, as far as labels, the budget and the least stall allow.
    """

    scale: float = 1.0
    scale_ub: float | None = None
    pop_size: int = 50
    epoch: int = 200
    max_early_stop: int = 25
    optimizer: Literal["DE", "SA"] = "DE"
    seed: int | None = None
    threshold_mb: float = 0.1
    n_blocks: int = 4
    min_blocks: int = 1

    def __post_init__(self) -> None:
        check_blocks(self.min_blocks, self.n_blocks)
        if self.optimizer not in ("DE", "SA"):
            raise ValueError(f"optimizer is {self.optimizer!r}; known: DE, SA")
        if min(self.pop_size, self.epoch, self.max_early_stop) < 1:
            raise ValueError("pop_size, epoch and max_early_stop must be at least 1")

    def _bus(self) -> tuple[float, bool]:
        return self.scale if self.scale_ub is None else min(self.scale, self.scale_ub), True

    def choose(self, problem: Problem) -> Choice:
        """Return the best choice for a problem whose budget can be met."""
        best = problem.best(
            [
                KnapsackStrategy(n_blocks=self.n_blocks).choose(problem),
                GlobalOffloadStrategy(n_blocks=self.n_blocks).choose(problem),
            ]
        )
        best = improve(problem, best, self.n_blocks)
        for _ in range(min(self.epoch, self.max_early_stop)):
            better = self._round(problem, best)
            if problem.score(better) >= problem.score(best):
                break
            best = better
        return best

    def _round(self, problem: Problem, best: Choice) -> Choice:
        found = [best]
        optimized = OptimizedRoundRobinAssignment(min(2, self.n_blocks), self.n_blocks)
        full = [len(levels) - 1 for levels in problem.levels]
        candidates = [
            _spread_to_all(problem, best),
            with_blocks(problem, full, optimized, self.n_blocks).blocks,
        ]
        if len(problem.active) <= _ALL_SHARINGS:
            candidates += _sharings(problem, self.n_blocks)
        for blocks in dict.fromkeys(candidates if worthwhile(problem) else []):
            answer = Program(problem, blocks, near=best).solve(better_than=problem.best(found))
            if answer is not None:
                found.append(answer)
        found.append(assign(problem, best.levels, self.n_blocks))
        return improve(problem, problem.best(found), self.n_blocks)


def _sharings(problem: Problem, n_blocks: int) -> list[tuple[int, ...]]:
    """All ways to share blocks among the labels that may be offloaded."""
    partial: list[tuple[int, ...]] = [()]
    for i in range(len(problem.labels)):
        partial = [
            (*blocks, block)
            for blocks in partial
            for block in (
                range(min(max(blocks, default=NO_BLOCK) + 2, n_blocks))
                if i in problem.active
                else [NO_BLOCK]
            )
        ]
    return partial


def _spread_to_all(problem: Problem, choice: Choice) -> tuple[int, ...]:
    """Give labels without a block that of the nearest one before that has one."""
    blocks, nearest = list(choice.blocks), next((b for b in choice.blocks[::-1] if b >= 0), 0)
    for i in range(len(blocks)):
        if blocks[i] == NO_BLOCK and i in problem.active:
            blocks[i] = nearest
        elif blocks[i] != NO_BLOCK:
            nearest = blocks[i]
    return tuple(blocks)
