"""The way from a question to a plan, which all strategies that pick one `Choice` share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

from modelopt_lite.offload.stats import LayerStatistics
from modelopt_lite.offload.strategies.base import StrategyResult
from modelopt_lite.offload.strategies.problem import Choice, Problem, Request


class ChoosingStrategy(ABC):
    """Makes a `Problem` of what is asked, chooses, and lets the problem turn that into a plan.

    Subclasses have the fields ``threshold_mb`` (tensors below so many MiB stay resident, unless the
    budget needs them), ``n_blocks`` (most blocks) and ``min_blocks`` (fewest).
    """

    __slots__ = ()

    @property
    @abstractmethod
    def threshold_mb(self) -> float: ...  # noqa: D102 - see the class

    @property
    @abstractmethod
    def n_blocks(self) -> int: ...  # noqa: D102

    @property
    @abstractmethod
    def min_blocks(self) -> int: ...  # noqa: D102

    @abstractmethod
    def choose(self, problem: Problem) -> Choice:
        """Return the choice for a problem whose budget is at least `_floor`."""

    def compute(
        self,
        layer_stats: Sequence[LayerStatistics],
        memory_stats: Mapping[int, float] | None = None,
        max_gpu_mem_bytes: int | None = None,
    ) -> StrategyResult:
        """See `Strategy.compute`."""
        scale, first = self._bus()
        request = Request(
            layers=layer_stats,
            memory_stats=memory_stats,
            budget=max_gpu_mem_bytes,
            scale=scale,
            threshold_mb=self.threshold_mb,
            min_blocks=self.min_blocks,
            first=first,
        )
        problem = self._problem(request)
        problem.require(self._floor(problem), self._who())
        return problem.result(self.choose(problem), self._who())

    def _bus(self) -> tuple[float, bool]:
        """Return as how many times as fast the bus is planned, and if the first label may leave."""
        return 1.0, True

    def _problem(self, request: Request) -> Problem:
        return request.problem()

    def _floor(self, problem: Problem) -> int:
        """Return the least budget in bytes that the strategy can keep within."""
        return problem.floor()

    def _who(self) -> str:
        """Return what messages call the strategy."""
        return type(self).__name__


def check_blocks(min_blocks: int, n_blocks: int) -> None:
    """Raise ValueError unless 1 <= min_blocks <= n_blocks."""
    if not 1 <= min_blocks <= n_blocks:
        raise ValueError(
            f"min_blocks={min_blocks}, n_blocks={n_blocks}: needs 1 <= min_blocks <= n_blocks"
        )
