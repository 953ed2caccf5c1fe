"""When a tensor's bytes on the device may be given to the next."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from modelopt_lite.offload.stats import TensorStatistics
from modelopt_lite.offload.strategies.base import StrategyResult


class ReleaseStrategy(Protocol):
    """Decides after which label's compute each offloaded tensor is let go."""

    def compute(self, result: StrategyResult) -> dict[str, tuple[TensorStatistics, ...]]:
        """Return, by label, the tensors to let go when its compute has ended."""


@dataclass(frozen=True, slots=True)
class ReleaseAfterUse:
    """Let tensors go after the one label that computes with them: what blocks are planned for."""

    def compute(self, result: StrategyResult) -> dict[str, tuple[TensorStatistics, ...]]:
        """Return the offloaded tensors by their own label."""
        return result.offloaded
