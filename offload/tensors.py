"""What belongs to which label, where it rests, and the plan that moves it."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from modelopt_lite.errors import StrategyComputeError
from modelopt_lite.offload.cargo import Cargo, IndirectCargo, Managed, pack
from modelopt_lite.offload.config import OffloadConfig
from modelopt_lite.offload.device import Device
from modelopt_lite.offload.discovery import ModuleTracker, match_prefixes, with_fields
from modelopt_lite.offload.ledger import RESIDENT, Ledger
from modelopt_lite.offload.loader import BlockLoader, DirectLoader
from modelopt_lite.offload.selection import Selection
from modelopt_lite.offload.stats import LayerStatisticsCollector, TensorStatistics
from modelopt_lite.offload.strategies import AdaptiveStrategy, Strategy, StrategyResult
from modelopt_lite.offload.timeline import Timeline


class TensorManager:
    """Owns the tensors of one offloaded model.

    Args:
        model: The model; its parameters rest in host memory.
        selection: Units and resident parameters.
        config: How to offload.
        device: Where units compute.
        _enable_untraced_tensor_discovery: Off, only what a trap was seen to read is moved.

    Attributes:
        layer_statistics_collector: Tensors and timings by label.
        ledger: Every byte by tier and owner.
        loader: What brings labels in, in the present phase.
    """

    def __init__(
        self,
        model: nn.Module,
        selection: Selection,
        config: OffloadConfig,
        device: Device,
        *,
        _enable_untraced_tensor_discovery: bool = True,
    ) -> None:
        self._model = model
        self._selection = selection
        self._config = config
        self._device = device
        self._discover_untraced = _enable_untraced_tensor_discovery
        self._parameters = dict(model.named_parameters(remove_duplicate=False))
        self._by_label: dict[str, list[Managed]] = {}
        self._original: dict[int, tuple[Managed, Tensor]] = {}
        self._moved: list[tuple[Tensor, torch.device]] = []
        self._cargos: dict[str, Cargo] = {}
        self.table: dict[int, Tensor] = {}
        self.layer_statistics_collector = LayerStatisticsCollector()
        self.ledger = Ledger()
        self.timeline = Timeline(device)
        self.plan: StrategyResult | None = None
        self.loader: DirectLoader | BlockLoader = DirectLoader(device, {}, self.ledger)

    @property
    def labels(self) -> list[str]:
        """All labels, in the order in which they were first seen."""
        return list(self._by_label)

    @property
    def resident_bytes(self) -> int:
        """Bytes of weights and buffers that stay on the device whatever the strategy."""
        return self.ledger.held(RESIDENT)["device"]

    def own_units(self) -> None:
        """Give each unit the parameters that the selection lets leave the device (strategy 1)."""
        for label, paths in self._selection.offloaded.items():
            self.add(label, (m for path in paths for m in self._managed(path)))

    def add(self, label: str, tensors: Iterable[Managed]) -> None:
        """Make a label, with tensors that no label has yet; what two would have stays resident."""
        taken = {id(m.tensor) for managed in self._by_label.values() for m in managed}
        mine: dict[int, Managed] = {}
        for managed in tensors:
            if id(managed.tensor) not in taken:
                mine.setdefault(id(managed.tensor), managed)
        self._by_label[label] = list(mine.values())
        self.layer_statistics_collector.set_tensors(
            label,
            (
                TensorStatistics(
                    tensor_id=id(m.tensor),
                    name=m.name,
                    size_bytes=m.nbytes,
                    load_time_ms=0.0,
                )
                for m in mine.values()
                if m.nbytes
            ),
        )

    def place(self) -> None:
        """Move what stays resident to the device, and pack what leaves into host blocks."""
        moving = {id(m.tensor) for managed in self._by_label.values() for m in managed}
        for tensor in (*self._parameters.values(), *self._model.buffers()):
            if id(tensor) not in moving:
                self._keep(tensor)
        for label, managed in self._by_label.items():
            if managed and label not in self._cargos:
                for m in managed:
                    if _is_part_of_storage(m.tensor):  # packing would undo the sharing for good
                        self._original[id(m.tensor)] = (m, m.tensor.data)
                self._cargos[label] = self._packed(label, managed)
                self.ledger.add("host", label, self._cargos[label].nbytes)
        self.loader = DirectLoader(self._device, self._cargos, self.ledger)

    def observed(self, tracker: ModuleTracker) -> None:
        """Give manual traps the tensors of the modules that ran in them (strategies 2 and 3)."""
        for label, managed in tracker.tensors(self._selection.allowed.__contains__).items():
            self.add(label, managed)
        if not self._discover_untraced:
            return
        names = {label: [m.name for m in managed] for label, managed in self._by_label.items()}
        known = {name for found in names.values() for name in found}
        rest = [name for name in self._selection.allowed if name not in known]
        for name, label in match_prefixes(names, rest).items():
            self.add(label, [*self._by_label[label], *self._managed(name)])

    def transfer_curve(self) -> dict[int, float]:
        """Measure copies of the largest label's size and fractions of it: bytes -> ms, median."""
        largest = max((cargo.nbytes for cargo in self._cargos.values()), default=0)
        curve: dict[int, float] = {}
        for size in sorted({max(largest // part, 1) for part in (1, 2, 4, 8)} if largest else ()):
            target = self._device.allocate(size)
            source = self._device.pin(torch.zeros(size, dtype=torch.uint8))
            times = []
            for _ in range(5):
                start, end = (self._device.event(timing=True) for _ in range(2))
                self._device.record(start)
                self._device.copy(target, source, None)
                self._device.record(end)
                self._device.synchronize(end)
                times.append(self._device.elapsed(start, end))
            self._device.free(target)
            curve[size] = max(sorted(times)[2], 1e-6)
        return curve

    def infer(self, order: list[str], budget: int | None) -> None:
        """Plan with the timings that there are, and bring weights in by the plan from now on.

        Raises:
            StrategyComputeError: The budget is below what the strategy can reach.
        """
        self.loader.close()
        layers, _ = self.layer_statistics_collector.timed_layer_stats()
        layers = sorted(layers, key=lambda layer: order.index(layer.label))
        strategy = self._config.load_strategy or AdaptiveStrategy(
            scale=self._config.transfer_budget_scale, n_blocks=self._config.num_blocks
        )
        assert isinstance(strategy, Strategy)
        left = None if budget is None else budget - self.resident_bytes
        if left is not None and left <= 0:
            raise StrategyComputeError(
                f"the budget is {budget:,} bytes, and {self.resident_bytes:,} stay on the device "
                "whatever the strategy; raise max_gpu_mem_fraction or exclude less",
                smallest_budget=self.resident_bytes + 1,
            )
        self.plan = strategy.compute(layers, self.transfer_curve() or None, left)
        self._apply(self.plan, [layer.label for layer in layers])

    def _apply(self, plan: StrategyResult, order: list[str]) -> None:
        """Repack each label to what the plan moves; the rest of it stays on the device."""
        moving = {label: {t.tensor_id for t in ts} for label, ts in plan.offloaded.items()}
        cargos: dict[str, Cargo] = {}
        for label, managed in self._by_label.items():
            ids = moving.get(label, set())
            goes = [m for m in managed if id(m.tensor) in ids]
            for m in managed:
                if id(m.tensor) not in ids:
                    self._keep(m.tensor, owner=label)
            self.ledger.remove("host", label)
            if goes:
                cargos[label] = self._packed(label, goes)
                self.ledger.add("host", label, cargos[label].nbytes)
        self._cargos = cargos
        blocks = plan.block_data.label_to_block_id if plan.block_data else {}
        sizes: dict[int, int] = {}
        for label, cargo in cargos.items():
            sizes[blocks[label]] = max(sizes.get(blocks[label], 0), cargo.nbytes)
        self.loader = BlockLoader(
            self._device, order, cargos, blocks, sizes, self.ledger, self.timeline
        )

    def release(self) -> None:
        """Put every tensor back to where it was before `place`."""
        self.loader.close()
        for cargo in self._cargos.values():
            for managed in cargo.tensors:
                managed.bind(managed.tensor.data.clone())  # out of the block it shares
        for managed, value in self._original.values():
            managed.bind(value)
        for tensor, device in self._moved:
            tensor.data = tensor.data.to(device)
        self._original.clear()
        self._moved.clear()
        self._cargos.clear()

    def _managed(self, path: str) -> list[Managed]:
        return with_fields(path, self._parameters[path])

    def _packed(self, label: str, managed: list[Managed]) -> Cargo:
        cargo = pack(label, managed, None)
        if self._config.profile_mode != "torch_function":
            return cargo
        return IndirectCargo(
            cargo.label,
            cargo.tensors,
            cargo.offsets,
            cargo.nbytes,
            cargo.source,
            cargo.resting,
            self.table,
        )

    def _keep(self, tensor: Tensor, owner: str = RESIDENT) -> None:
        """Let a tensor stay on the device."""
        if tensor.device.type not in ("meta", self._device.torch_device.type):
            self._moved.append((tensor, tensor.device))
            tensor.data = tensor.data.to(self._device.torch_device)
        self.ledger.add("device", owner, tensor.numel() * tensor.element_size())


def _is_part_of_storage(tensor: Tensor) -> bool:
    return tensor.untyped_storage().nbytes() > tensor.numel() * tensor.element_size()
