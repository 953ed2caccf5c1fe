"""What belongs to which label, where it rests, and the plan that moves it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from modelopt_lite.errors import OffloadError
from modelopt_lite.offload.budget import free_bytes, plan_within
from modelopt_lite.offload.cargo import (
    Cargo,
    IndirectCargo,
    Managed,
    can_move,
    differs,
    is_plain,
    pack,
    packed_bytes,
    plan_block,
    storage_of,
)
from modelopt_lite.offload.config import OffloadConfig
from modelopt_lite.offload.device import Device, new_buffer
from modelopt_lite.offload.directloader import DirectLoader
from modelopt_lite.offload.discovery import (
    ModuleTracker,
    OutsideReads,
    match_prefixes,
    with_fields,
)
from modelopt_lite.offload.ledger import RESIDENT, Ledger
from modelopt_lite.offload.loader import BlockLoader
from modelopt_lite.offload.nesting import Nest
from modelopt_lite.offload.ondemand import OnDemandLoader
from modelopt_lite.offload.rowtensors import RowTensors
from modelopt_lite.offload.selection import Selection
from modelopt_lite.offload.stats import (
    LayerStatistics,
    LayerStatisticsCollector,
    TensorStatistics,
)
from modelopt_lite.offload.strategies import AdaptiveStrategy, Strategy, StrategyResult
from modelopt_lite.offload.timeline import Timeline


class TensorManager(RowTensors):
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
        strategy: What decides on it.
        plan: What it decided; None before INFERENCE.
        table: In indirect mode, id of a tensor -> its copy on the device, while that is there.

    Raises:
        OffloadError: A parameter is on the meta device.
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
        super().__init__()
        self._model = model
        self._selection = selection
        self._config = config
        self._device = device
        self._discover_untraced = _enable_untraced_tensor_discovery
        self._parameters = dict(model.named_parameters(remove_duplicate=False))
        for name, parameter in self._parameters.items():
            if parameter.is_meta:
                raise OffloadError(f"{name!r} is on the meta device; load its values first")
        self._by_label: dict[str, list[Managed]] = {}
        self._storages = Counter(storage_of(t) for t in self._everything() if is_plain(t))
        self._before: dict[int, tuple[Tensor, Tensor]] = {}
        self._moved: dict[int, tuple[Tensor, torch.device]] = {}
        self._cargos: dict[str, Cargo] = {}
        self._nests: set[Nest] = set()
        self._curve: dict[int, float] | None = None
        self.layer_statistics_collector = LayerStatisticsCollector()
        self.ledger = Ledger()
        self.timeline = Timeline(device, ranges=config.enable_instrumentation)
        strategy = config.load_strategy or AdaptiveStrategy(
            scale=config.transfer_budget_scale, n_blocks=config.num_blocks
        )
        assert isinstance(strategy, Strategy)
        self.strategy = strategy
        self.plan: StrategyResult | None = None
        self.loader: DirectLoader | BlockLoader = DirectLoader(device, {}, self.ledger, self._nests)

    @property
    def labels(self) -> list[str]:
        """All labels, in the order in which they were first seen."""
        return list(self._by_label)

    @property
    def managed_ids(self) -> frozenset[int]:
        """Ids of the tensors that labels bring in."""
        return frozenset(id(m.tensor) for ms in self._by_label.values() for m in ms)

    def moves(self, label: str) -> bool:
        """Whether a label has weights that are brought in."""
        return label in self._cargos

    @property
    def resident_bytes(self) -> int:
        """Bytes of weights and buffers that stay on the device whatever the strategy."""
        return self.ledger.held(RESIDENT).get("device", 0)

    def assign(self, names: Mapping[str, Sequence[str]]) -> None:
        """Give each label its parameters, with the tensors attached to them.

        What cannot move, or is read under another label or under none, stays on the device.
        """
        label_of = {id(self._parameters[n]): label for label, ns in names.items() for n in ns}
        readers: dict[int, set[str]] = {}
        for name, parameter in self._parameters.items():
            for m in with_fields(name, parameter):
                readers.setdefault(id(m.tensor), set()).add(label_of.get(id(parameter), ""))
        for name, buffer in self._model.named_buffers():
            for m in with_fields(name, buffer):
                readers.setdefault(id(m.tensor), set()).add("")
        for label, own in names.items():
            mine: dict[int, Managed] = {}
            for m in (m for name in own for m in with_fields(name, self._parameters[name])):
                if readers[id(m.tensor)] == {label} and can_move(m.tensor):
                    mine.setdefault(id(m.tensor), m)
            self._by_label[label] = list(mine.values())
        self._by_label.update(self._managed_rows)
        for label, managed in self._by_label.items():
            self.layer_statistics_collector.set_tensors(label, self._statistics(managed))

    def watch(self) -> OutsideReads:
        """Return a mode that sees what is read while its label is not in."""
        label_of = {id(m.tensor): label for label, ms in self._by_label.items() for m in ms}
        assert isinstance(self.loader, DirectLoader)
        place, modules = self._device.torch_device, self._model.modules()
        return OutsideReads(label_of, self.loader.is_in, place, modules)

    def keep_resident(self, ids: frozenset[int]) -> list[str]:
        """Take tensors from their labels, as something else reads them; return their names."""
        names = []
        for label, managed in self._by_label.items():
            left = [m for m in managed if id(m.tensor) not in ids and id(m.holder) not in ids]
            if len(left) < len(managed):
                names += [m.name for m in managed if m not in left]
                self._by_label[label] = left
                self.layer_statistics_collector.set_tensors(label, self._statistics(left))
        return names

    def place(self) -> None:
        """Move what stays resident to the device, and pack what leaves into host blocks."""
        self.loader.close()
        self._lay_out(self._by_label)
        self.loader = DirectLoader(self._device, self._cargos, self.ledger, self._nests)

    def observed(self, tracker: ModuleTracker) -> None:
        """Give manual traps the tensors of the modules that ran in them (strategies 2 and 3)."""
        names = tracker.parameters(self._selection.allowed.__contains__)
        if self._discover_untraced:
            known = {id(self._parameters[name]) for found in names.values() for name in found}
            known |= tracker.unattributable
            rest = [n for n in self._selection.allowed if id(self._parameters[n]) not in known]
            for name, label in sorted(match_prefixes(names, rest).items()):
                names[label].append(name)
        self.assign(names)

    def transfer_curve(self) -> dict[int, float]:
        """Measure copies of the largest label's size and fractions of it: bytes -> ms, median."""
        if self._curve is not None:
            return self._curve
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
        self._curve = curve
        return curve

    def infer(self, order: Sequence[str], budget: int | None) -> None:
        """Plan with the timings that there are, and bring weights in by the plan from now on.

        Where planning fails, everything goes on as before.

        Raises:
            StrategyComputeError: The budget, or what is free where there is none, is below what the
                strategy can reach.
        """
        curve = self.transfer_curve() or None
        free = free_bytes(self._device, self.ledger)

        def compute(most: int | None) -> StrategyResult:
            return self.strategy.compute(self._layers(order, most), curve, most)

        plan = plan_within(compute, budget, free, self.resident_bytes, sorted(self._nests))
        self._apply(plan, [layer.label for layer in self._layers(order, free)])
        if budget is not None and isinstance(self.loader, BlockLoader):
            taken = self.ledger.total("device") + self.loader.unclaimed_bytes
            self.loader.spare = budget - taken

    def _layers(self, order: Sequence[str], budget: int | None) -> list[LayerStatistics]:
        """Return the labels to plan with.

        One that never ran (an expert that no token chose) stays resident, unless memory is short.
        """
        at = {label: i for i, label in enumerate(order)}
        if budget is None:
            layers, _ = self.layer_statistics_collector.timed_layer_stats()
        else:
            layers = self.layer_statistics_collector.get_layer_stats()
        return sorted(layers, key=lambda layer: at.get(layer.label, math.inf))

    def _apply(self, plan: StrategyResult, order: list[str]) -> None:
        """Repack each label to what the plan moves; the rest of it stays on the device."""
        self.loader.close()
        ids = {
            label: {i for t in ts for i in (t.tensor_id, *t.inner_ids)}
            for label, ts in plan.offloaded.items()
        }
        self._lay_out(
            {
                label: [m for m in managed if id(m.tensor) in ids.get(label, ())]
                for label, managed in self._by_label.items()
            }
        )
        blocks = plan.block_data.label_to_block_id if plan.block_data else {}
        blocks = {label: block for label, block in blocks.items() if label in self._cargos}
        sizes: dict[int, int] = {}
        for label, block in blocks.items():
            sizes[block] = max(sizes.get(block, 0), self._cargos[label].nbytes)
        timeline = self.timeline if self._config.records_passes else None
        kind = OnDemandLoader if self._config.transfer_mode == "strategy" else BlockLoader
        self.loader = kind(self._device, order, self._cargos, blocks, sizes, self.ledger, timeline)
        self.plan = plan

    def _lay_out(self, moving: Mapping[str, Sequence[Managed]]) -> None:
        """Pack what moves, let all else stay on the device, and count both anew."""
        goes = {id(m.tensor) for managed in moving.values() for m in managed}
        owner = {id(m.tensor): label for label, ms in self._by_label.items() for m in ms}
        for label in (RESIDENT, *self._by_label):
            self.ledger.remove("device", label)
            self.ledger.remove("host", label)
        packed = (c for c in self._cargos.values() if isinstance(c.source, Tensor))
        rooms = {storage_of(c.resting[0]) for c in packed}
        for tensor in self._everything():
            if id(tensor) not in goes:
                self._keep(tensor, owner.get(id(tensor), RESIDENT), rooms)
                self._note_kept(tensor)
        for label, managed in moving.items():
            old = self._cargos.pop(label, None)
            if not managed:
                continue
            if old is None or [id(m.tensor) for m in old.tensors] != [
                id(m.tensor) for m in managed
            ]:
                for m in managed:
                    self._remember(m.tensor)
                old = self._pack(label, managed)
            self._cargos[label] = old
            self.ledger.add(old.tier, label, old.nbytes)

    def release(self, *, keep: bool = True) -> None:
        """Put every tensor back to where it was before `place`; or leave parameters empty."""
        self.loader.close()
        if not keep:
            self._empty()
        with torch.inference_mode(False), torch.no_grad():
            rooms = set()
            for cargo in self._cargos.values():
                if isinstance(cargo.source, Tensor):
                    rooms.add(storage_of(cargo.source))
                for managed in cargo.tensors:
                    # Out of the block it shares with others.
                    if id(managed.tensor) not in self._before and isinstance(cargo.source, Tensor):
                        managed.bind(managed.tensor.data.clone())
            for tensor, value in self._before.values():
                if differs(tensor, value):  # changed while it was offloaded
                    value.copy_(tensor.data)
                tensor.data = value
            for tensor, device in self._moved.values():
                if tensor.device != device:
                    tensor.data = tensor.data.to(device)
        self._before.clear()
        self._moved.clear()
        self._cargos.clear()

    def _empty(self) -> None:
        """Let no parameter, and no tensor attached to one, hold memory."""
        everything = (
            m for name, tensor in self._parameters.items() for m in with_fields(name, tensor)
        )
        gone = {id(m.tensor): m.tensor for m in everything if not self._rests_on_disk(m.tensor)}
        for tensor in gone.values():
            if is_plain(tensor):
                tensor.data = tensor.data.new_empty(0)
        self._before = {key: value for key, value in self._before.items() if key not in gone}
        self._moved = {key: value for key, value in self._moved.items() if key not in gone}
        self._cargos = {k: c for k, c in self._cargos.items() if not isinstance(c.source, Tensor)}

    def _rests_on_disk(self, tensor: Tensor) -> bool:
        return False

    def _statistics(self, managed: Sequence[Managed]) -> list[TensorStatistics]:
        """One entry for each tensor with those attached to it: they move together."""
        groups: dict[int, list[Managed]] = {}
        for m in managed:
            groups.setdefault(id(m.holder), []).append(m)
        return [
            TensorStatistics(
                tensor_id=id(group[0].tensor),
                name=group[0].name,
                size_bytes=sum(self._bytes_in_block(m.tensor) for m in group),
                inner_ids=tuple(id(m.tensor) for m in group[1:]),
            )
            for group in groups.values()
        ]

    def _bytes_in_block(self, tensor: Tensor) -> int:
        """What a tensor takes in a block at most."""
        return packed_bytes(tensor)

    def _pack(self, label: str, managed: Sequence[Managed]) -> Cargo:
        indirect = self._config.profile_mode == "torch_function"
        if label in self._rows:
            return self._pack_rows(label, managed, indirect=indirect)
        _, size = plan_block([m.tensor for m in managed])
        room = new_buffer(size, torch.device("cpu"))
        if self._config.pinned_memory:
            room = self._device.pin(room, self._config.pinned_memory_mode)
        cargo = pack(label, managed, room)
        if not indirect:
            return cargo
        known = (label, cargo.tensors, cargo.offsets, cargo.nbytes, cargo.source, cargo.resting)
        return IndirectCargo(*known, self.table)

    def _keep(self, tensor: Tensor, owner: str, rooms: set[int]) -> None:
        """Let a tensor stay on the device, and out of host blocks that are given up."""
        if is_plain(tensor) and not tensor.is_meta:
            here = self._device.torch_device
            elsewhere = tensor.device.type != here.type or (
                here.index is not None and tensor.device.index != here.index
            )
            if elsewhere or storage_of(tensor) in rooms:
                self._remember(tensor)
                with torch.inference_mode(False), torch.no_grad():
                    tensor.data = tensor.data.to(here, copy=True)
        self.ledger.add("device", owner, tensor.numel() * tensor.element_size())

    def _remember(self, tensor: Tensor) -> None:
        """Note how a tensor was, where that cannot be told from its values."""
        shared = self._storages[storage_of(tensor)] > 1
        whole = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
        if id(tensor) not in self._before and id(tensor) not in self._moved:
            if shared or not whole:
                self._before[id(tensor)] = (tensor, tensor.data)
            else:
                self._moved[id(tensor)] = (tensor, tensor.device)

    def _everything(self) -> Iterator[Tensor]:
        """Yield each parameter, buffer and tensor attached to one, once; of split ones the rows."""
        for rows in self._rows_of.values():
            yield from rows
        seen = set(self._rows_of)
        named = (*self._parameters.items(), *self._model.named_buffers())
        for managed in (m for name, tensor in named for m in with_fields(name, tensor)):
            if id(managed.tensor) not in seen:
                seen.add(id(managed.tensor))
                yield managed.tensor
