"""The disk tier's part of the runtime: blocks that are filled from files, and what that takes."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from modelopt_lite.offload.cargo import Cargo, IndirectCargo, Managed, plan_block
from modelopt_lite.offload.config import OffloadConfig
from modelopt_lite.offload.device import Device
from modelopt_lite.offload.disk import DiskWeights, disk_weights
from modelopt_lite.offload.diskblock import BlockSource, most_as_on_disk, plan_as_on_disk
from modelopt_lite.offload.hostmemory import host_memory
from modelopt_lite.offload.lazyparam import LazyParameter
from modelopt_lite.offload.ledger import RESIDENT
from modelopt_lite.offload.selection import Selection
from modelopt_lite.offload.tensors import TensorManager

log = logging.getLogger("modelopt_lite.offload")

if TYPE_CHECKING:
    _Base = Cargo
else:
    _Base = object  # a mixin for either kind of cargo


class _OnDisk(_Base):
    """What cargos on disk do otherwise: changed values stay in memory, and are read from there."""

    __slots__ = ()

    def adopt(self) -> bool:
        """See `Cargo.adopt`. Values that were changed in place are not those on disk any more."""
        changed = super().adopt()
        assert isinstance(self.source, BlockSource)
        self.source.follow(self.versions)
        return changed

    def write_back(self, views: Sequence[Tensor], before: Sequence[int]) -> None:
        """See `Cargo.write_back`. The files are never written."""
        changed = [now != then for now, then in zip(self.versions, before, strict=True)]
        super().write_back(views, before)
        for index in (index for index, is_changed in enumerate(changed) if is_changed):
            assert isinstance(self.source, BlockSource)
            self.source.take_from_memory(index)
            if isinstance(tensor := self.tensors[index].tensor, LazyParameter):
                tensor.keep()


class DiskCargo(_OnDisk, Cargo):
    """A cargo whose bytes are read from a checkpoint's files."""

    __slots__ = ()


class IndirectDiskCargo(_OnDisk, IndirectCargo):
    """The same where tensors are left alone."""

    __slots__ = ()


class DiskTensorManager(TensorManager):
    """Owns the tensors of a model from `open_from_disk`.

    What is offloaded stays on disk and is read into blocks; what stays on the device is read into
    memory once. Where the device is the host itself, tables of embeddings stay mapped: a pass looks
    up few of their rows, and only those are read.
    """

    def __init__(
        self,
        model: nn.Module,
        selection: Selection,
        config: OffloadConfig,
        device: Device,
        weights: DiskWeights,
        **options: Any,
    ) -> None:
        super().__init__(model, selection, config, device, **options)
        self._weights = weights
        if weights.source.total_bytes > host_memory()[0]:
            weights.read_uncached()
        self._read_in: dict[int, tuple[Tensor, Tensor, tuple[int, int]]] = {}
        # Kernels of accelerators want tensors aligned, wherever they lie in their pages on disk.
        self._as_on_disk = device.torch_device.type == "cpu"
        self._looked_up = _tables(model) if device.torch_device.type == "cpu" else frozenset()

    def can_split(self, parameter: nn.Parameter) -> bool:
        """See `RowTensors.can_split`."""
        if self._weights.covers(parameter):
            return self._weights.can_split(parameter)
        return not isinstance(parameter, LazyParameter) and super().can_split(parameter)

    def _rows_at_rest(self, parameter: nn.Parameter, rows: range) -> Tensor:
        if self._weights.covers(parameter):
            return self._weights.rows(parameter, rows)
        return super()._rows_at_rest(parameter, rows)

    def transfer_curve(self) -> dict[int, float]:
        """Measure how long the largest cargo takes to be read: bytes -> ms, parts in proportion.

        A page cache that keeps the checkpoint from pass to pass counts, as copies will be from it.
        """
        largest = max(self._cargos.values(), key=lambda cargo: cargo.nbytes, default=None)
        if self._curve is not None or largest is None:
            return self._curve or {}
        target = self._device.allocate(largest.nbytes)
        start, end = (self._device.event(timing=True) for _ in range(2))
        self._device.record(start)
        self._device.copy(target, largest.source, None, label=largest.label)
        self._device.record(end)
        self._device.synchronize(end)
        ms = max(self._device.elapsed(start, end), 1e-6)
        self._device.free(target)
        sizes = {part: largest.nbytes // part for part in (8, 4, 2, 1) if largest.nbytes >= part}
        self._curve = {size: ms / part for part, size in sizes.items()}
        return self._curve

    def release(self, *, keep: bool = True) -> None:
        """See `TensorManager.release`. What was read in rests on disk again."""
        super().release(keep=keep)
        for tensor, _, _ in list(self._read_in.values()):
            self._rest(tensor)

    def _lay_out(self, moving: Mapping[str, Sequence[Managed]]) -> None:
        for label in (RESIDENT, *self._by_label):
            self.ledger.remove("disk", label)
        super()._lay_out(moving)

    def _pack(self, label: str, managed: Sequence[Managed]) -> Cargo:
        for m in managed:
            self._rest(m.tensor)
        if not any(self._weights.covers(m.tensor) for m in managed):
            return super()._pack(label, managed)
        values = [m.tensor for m in managed]
        resting = tuple(self._weights.resting(value) for value in values)
        if self._as_on_disk:
            offsets, size = plan_as_on_disk(resting, self._weights.places(values))
        else:
            offsets, size = plan_block(resting)
        source = self._weights.block(values, offsets)
        if self._config.profile_mode != "torch_function":
            return DiskCargo(label, tuple(managed), offsets, size, source, resting)
        return IndirectDiskCargo(label, tuple(managed), offsets, size, source, resting, self.table)

    def _bytes_in_block(self, tensor: Tensor) -> int:
        return most_as_on_disk(tensor) if self._as_on_disk else super()._bytes_in_block(tensor)

    def _keep(self, tensor: Tensor, owner: str, rooms: set[int]) -> None:
        if not self._weights.covers(tensor):
            super()._keep(tensor, owner, rooms)
            return
        resting = self._weights.resting(tensor)
        if id(tensor) in self._looked_up and not isinstance(tensor, LazyParameter):
            self.ledger.add("disk", owner, resting.nbytes)
            return
        with torch.inference_mode(False), torch.no_grad():
            tensor.data = self._weights.load(tensor).to(self._device.torch_device)
        self._read_in[id(tensor)] = (tensor, resting, _state_of(tensor))
        self.ledger.add("device", owner, resting.nbytes)

    def _rests_on_disk(self, tensor: Tensor) -> bool:
        return id(tensor) in self._read_in or self._weights.covers(tensor)

    def _rest(self, tensor: Tensor) -> None:
        """Let what was read in rest on disk again; changed values go on in memory."""
        _, resting, state = self._read_in.pop(id(tensor), (tensor, None, (0, 0)))
        if resting is None:
            return
        unchanged = _state_of(tensor) == state or id(tensor) in self._rest_of
        with torch.inference_mode(False), torch.no_grad():
            tensor.data = resting if unchanged else tensor.data.to(resting.device)


def _state_of(tensor: Tensor) -> tuple[int, int]:
    """What changes when a tensor is changed in place, or given other data."""
    with torch._C.DisableTorchFunctionSubclass():
        return tensor._version, tensor.data_ptr()


def _tables(model: nn.Module) -> frozenset[int]:
    """Ids of the parameters of which rows are looked up, and that nothing else reads."""
    tables: set[int] = set()
    others: set[int] = set()
    for module in model.modules():
        ids = {id(parameter) for parameter in module.parameters(recurse=False)}
        (tables if type(module).forward is nn.Embedding.forward else others).update(ids)
    return frozenset(tables - others)


def make_tensor_manager(
    model: nn.Module, selection: Selection, config: OffloadConfig, device: Device
) -> TensorManager:
    """Return the manager of a model's tensors, by where its weights are."""
    weights = disk_weights(model)
    if weights is not None:
        if config.shm_enabled:
            log.warning(
                "shm_enabled has no effect on weights on disk: processes share the pages of the "
                "checkpoint's files already"
            )
        return DiskTensorManager(model, selection, config, device, weights)
    if config.shm_enabled:
        from modelopt_lite.offload.sharedcargo import SharedTensorManager  # needs a POSIX system

        return SharedTensorManager(model, selection, config, device)
    return TensorManager(model, selection, config, device)
