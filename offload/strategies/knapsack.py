"""The knapsack family: which tensors to offload, decided by an integer program."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from modelopt_lite.offload.stats import LayerStatistics
from modelopt_lite.offload.strategies.assignment import StrictRoundRobinAssignment
from modelopt_lite.offload.strategies.base import StrategyResult
from modelopt_lite.offload.strategies.choosing import ChoosingStrategy, check_blocks
from modelopt_lite.offload.strategies.exact import Program, worthwhile
from modelopt_lite.offload.strategies.problem import Choice, Problem
from modelopt_lite.offload.strategies.search import (
    block_counts,
    good_start,
    improve,
    with_blocks,
)


@dataclass(frozen=True, slots=True)
class KnapsackStrategy(ChoosingStrategy):
    """The exact choice of tensors, for each number of blocks, with blocks taken in turn.

    In latency mode the smallest peak without a stall, where ``scale`` below 1 keeps that part of
    the bus in reserve and above 1 accepts stalls; in memory mode the least stall within the
    budget, whatever the scale. ``exact`` says what exact means.

    Args:
        scale: Copies are planned as if the bus were so many times as fast; latency mode only.
        cyclic: Whether the first label may be offloaded: its copy runs during the pass before.
        group_size: So many labels in a row, if they are alike, take the same tensors.
        threshold_mb: Tensors below so many MiB stay resident, unless the budget needs them.
        n_blocks: Most blocks.
        min_blocks: Fewest blocks, as far as labels, the budget and the least stall allow. More than
            needed cost memory and forgive timings that vary.
    """

    scale: float = 1.0
    cyclic: bool = True
    group_size: int = 1
    threshold_mb: float = 0.1
    n_blocks: int = 4
    min_blocks: int = 1

    def __post_init__(self) -> None:
        check_blocks(self.min_blocks, self.n_blocks)
        if self.group_size < 1:
            raise ValueError(f"group_size is {self.group_size}; it must be at least 1")

    def _bus(self) -> tuple[float, bool]:
        return self.scale, self.cyclic

    def choose(self, problem: Problem) -> Choice:
        """Return the best choice for a problem whose budget can be met."""
        alike = self.group_size > 1
        best = good_start(problem, self.n_blocks, fixed=alike)
        if not worthwhile(problem):
            return improve(problem, best, self.n_blocks, fixed=alike)
        full = [len(levels) - 1 for levels in problem.levels]
        for count in block_counts(problem, self.n_blocks):
            blocks = with_blocks(problem, full, StrictRoundRobinAssignment(), count).blocks
            program = Program(problem, blocks, near=best, group_size=self.group_size)
            better = program.solve(better_than=best)
            if better is not None:
                best = problem.best([best, better])
        return improve(problem, best, self.n_blocks, fixed=alike)


@dataclass(frozen=True, slots=True)
class KnapsackBlockStrategy:
    """`KnapsackStrategy` with the first label resident, as loaders that cannot wrap round need."""

    scale: float = 1.0
    group_size: int = 1
    threshold_mb: float = 0.1
    n_blocks: int = 4
    min_blocks: int = 1

    def compute(
        self,
        layer_stats: Sequence[LayerStatistics],
        memory_stats: Mapping[int, float] | None = None,
        max_gpu_mem_bytes: int | None = None,
    ) -> StrategyResult:
        """See `Strategy.compute`."""
        return KnapsackStrategy(
            scale=self.scale,
            cyclic=False,
            group_size=self.group_size,
            threshold_mb=self.threshold_mb,
            n_blocks=self.n_blocks,
            min_blocks=self.min_blocks,
        ).compute(layer_stats, memory_stats, max_gpu_mem_bytes)


@dataclass(frozen=True, slots=True)
class AdaptiveKnapsackStrategy:
    """The member of the knapsack family for a loader.

    ``loader_type`` is a transfer mode. All of this package's loaders wrap round the pass, so the
    three modes differ in nothing here; the field is checked, and kept for existing callers.
    """

    loader_type: Literal["strategy", "allocation_block_transfer", "raw_block_transfer"] = "strategy"
    scale: float = 1.0
    group_size: int = 1
    threshold_mb: float = 0.1
    n_blocks: int = 4
    min_blocks: int = 1

    def __post_init__(self) -> None:
        known = ("strategy", "allocation_block_transfer", "raw_block_transfer")
        if self.loader_type not in known:
            raise ValueError(f"loader_type is {self.loader_type!r}; known: {', '.join(known)}")

    def compute(
        self,
        layer_stats: Sequence[LayerStatistics],
        memory_stats: Mapping[int, float] | None = None,
        max_gpu_mem_bytes: int | None = None,
    ) -> StrategyResult:
        """See `Strategy.compute`."""
        return KnapsackStrategy(
            scale=self.scale,
            group_size=self.group_size,
            threshold_mb=self.threshold_mb,
            n_blocks=self.n_blocks,
            min_blocks=self.min_blocks,
        ).compute(layer_stats, memory_stats, max_gpu_mem_bytes)
