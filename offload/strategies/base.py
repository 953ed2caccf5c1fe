"""What a strategy is asked and what it answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from modelopt_lite.offload.simulate import Simulation
from modelopt_lite.offload.stats import LayerStatistics, TensorStatistics


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockStrategyData:
    """The blocks of a plan. Labels are compute labels but for the keys of the last field.

    ``label_to_size_map`` gives the bytes that a label transfers, ``allocation_ordered`` the labels
    of each block in compute order, ``transfer_to_compute_map`` the label whose tensors may be
    copied from the entry of another label on: the one after the block's last use.
    """

    label_to_size_map: dict[str, int]
    allocation_ordered: dict[int, list[str]]
    block_sizes: dict[int, int]
    label_to_block_id: dict[str, int]
    transfer_to_compute_map: dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategyResult:
    """A plan, and what the simulator predicts of it.

    ``strategy_map`` gives, by transfer label, the tensors to copy from its entry on; tensors that
    are nowhere in it stay on the device. ``notes`` say what the caller may not have expected.
    """

    strategy_map: dict[str, tuple[TensorStatistics, ...]]
    block_data: BlockStrategyData | None
    prediction: Simulation
    notes: tuple[str, ...] = ()

    @property
    def offloaded(self) -> dict[str, tuple[TensorStatistics, ...]]:
        """Tensors to copy, by the label that computes with them, in compute order."""
        if self.block_data is None:
            return {}
        by_compute = {
            compute: self.strategy_map[transfer]
            for transfer, compute in self.block_data.transfer_to_compute_map.items()
        }
        return {label: by_compute[label] for label in self.block_data.label_to_size_map}

    @property
    def offloaded_bytes(self) -> int:
        """Bytes copied in every pass."""
        return sum(t.size_bytes for tensors in self.strategy_map.values() for t in tensors)


@runtime_checkable
class Strategy(Protocol):
    """Decides which tensors stay on the device, and which blocks the others pass through."""

    def compute(
        self,
        layer_stats: Sequence[LayerStatistics],
        memory_stats: Mapping[int, float] | None = None,
        max_gpu_mem_bytes: int | None = None,
    ) -> StrategyResult:
        """Plan a model.

        Args:
            layer_stats: The labels in compute order, with their tensors and durations in ms.
            memory_stats: Copy times in ms by size in bytes. None: the tensors' own load times.
            max_gpu_mem_bytes: Bytes that the tensors and blocks may take on the device (memory
                mode: the least stall within them). None (latency mode): as little as does not
                make a pass longer.

        Raises:
            StrategyComputeError: The budget is below what the strategy can reach; the message and
                ``smallest_budget`` say what that is. Also where there is no copy time.
            ValueError: A label or a tensor is given twice.
        """
