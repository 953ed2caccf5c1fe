"""Strategies: which tensors stay on the device, and through which blocks the others pass."""

from __future__ import annotations

from modelopt_lite.offload.strategies.adaptive import AdaptiveStrategy
from modelopt_lite.offload.strategies.assignment import (
    AssignmentStrategy,
    OptimizedRoundRobinAssignment,
    StrictRoundRobinAssignment,
)
from modelopt_lite.offload.strategies.base import BlockStrategyData, Strategy, StrategyResult
from modelopt_lite.offload.strategies.global_offload import GlobalOffloadStrategy
from modelopt_lite.offload.strategies.knapsack import (
    AdaptiveKnapsackStrategy,
    KnapsackBlockStrategy,
    KnapsackStrategy,
)
from modelopt_lite.offload.strategies.layerwise import GreedyStrategy, NthLayerStrategy
from modelopt_lite.offload.strategies.release import ReleaseAfterUse, ReleaseStrategy
from modelopt_lite.offload.strategies.tensor_selection import GlobalTensorSelectionStrategy

__all__ = [
    "AdaptiveKnapsackStrategy",
    "AdaptiveStrategy",
    "AssignmentStrategy",
    "BlockStrategyData",
    "GlobalOffloadStrategy",
    "GlobalTensorSelectionStrategy",
    "GreedyStrategy",
    "KnapsackBlockStrategy",
    "KnapsackStrategy",
    "NthLayerStrategy",
    "OptimizedRoundRobinAssignment",
    "ReleaseAfterUse",
    "ReleaseStrategy",
    "Strategy",
    "StrategyResult",
    "StrictRoundRobinAssignment",
]
