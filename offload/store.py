"""Bring units' weights in from a checkpoint, and let them go.

Loading (disk to memory, any thread) is apart from attaching (memory to model, the thread that runs
the model), so that the next unit is read while one computes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from modelopt_lite.checkpoint.fill import read_entries
from modelopt_lite.checkpoint.names import NameMap, Piece, TensorGroup
from modelopt_lite.offload.units import Unit

_ALIGN = 64  # bytes; a cache line, and enough for every dtype


@dataclass(slots=True, eq=False)
class Loaded:
    """A unit's weights in memory.

    Attributes:
        unit: The unit.
        buffers: Entry of the model (or what it is tied to) -> its values, views of ``room``.
        sources: Name on disk -> values in the dtype on disk; views of ``room`` where the model
            holds them unchanged.
        room: The memory of all entries.
        amax: Name on disk -> largest magnitude, where whoever reads takes note of that.
    """

    unit: Unit
    room: Tensor
    buffers: dict[str, Tensor]
    sources: dict[str, Tensor] = field(default_factory=dict)
    amax: dict[str, Tensor] = field(default_factory=dict)


class WeightStore:
    """Loads units' entries from a checkpoint, and attaches them to a model.

    Args:
        model: The model, on the meta device; its entries are replaced while a unit is attached.
        names: The correspondence of the model's entries and the tensors on disk.
        read: ``read(name, out)`` reads one tensor from the checkpoint.
        keep_dtype: Whether an entry keeps the disk's dtype rather than the model's.
        dtype_on_disk: The dtype of a tensor on disk.
        device: Where the weights go.
        read_rows: Reads some rows of a tensor.
    """

    def __init__(
        self,
        model: nn.Module,
        names: NameMap,
        read: Callable[[str, Tensor | None], Tensor],
        *,
        keep_dtype: Callable[[str], bool],
        dtype_on_disk: Callable[[str], torch.dtype],
        device: torch.device,
        read_rows: Callable[[str, range], Tensor] | None = None,
    ) -> None:
        self._model = model
        self._names = names
        self._read = read
        self._keep_dtype = keep_dtype
        self._dtype_on_disk = dtype_on_disk
        self.device = device
        self._read_rows = read_rows
        self._blank = model.state_dict(keep_vars=True)
        self._rooms = Rooms(device)

    def bytes_of(self, unit: Unit) -> int:
        """Return how many bytes of memory a unit's entries take."""
        return self._layout(unit)[2]

    def sources_of(self, unit: Unit) -> list[str]:
        """Return the tensors on disk that a unit is made of."""
        groups, _, _ = self._layout(unit)
        sliced = unit.is_stacked and not unit.of_stack
        parts = [of_experts(g, unit.experts) if sliced else g for g in groups]
        return [source for group in parts for source in group.sources]

    def kept_apart(self, unit: Unit) -> list[str]:
        """Return the tensors on disk that a loaded unit holds beside the entries made of them."""
        groups, places, _ = self._layout(unit)
        dtypes = {target: dtype for target, _, _, dtype in places}
        return [
            source
            for group in groups
            for source in group.sources
            if group.convert is not None or self._dtype_on_disk(source) != dtypes[group.targets[0]]
        ]

    def load(self, unit: Unit) -> Loaded:
        """Read a unit's tensors; from any thread.

        Raises:
            CheckpointError: A tensor cannot be read.
        """
        groups, places, size = self._layout(unit)
        room = self._rooms.take(size, pool=_pool(unit))
        buffers = {
            target: room[start : start + shape.numel() * dtype.itemsize].view(dtype).view(shape)
            for target, start, shape, dtype in places
        }
        loaded = Loaded(unit, room, buffers)
        for group in groups:
            if unit.of_stack:
                self._load_rows(group, unit, loaded)
                continue
            part = of_experts(group, unit.experts) if unit.is_stacked else group
            read_entries(part, self._read_to, buffers, keep=loaded.sources.__setitem__)
        return loaded

    def _load_rows(self, group: TensorGroup, unit: Unit, loaded: Loaded) -> None:
        assert self._read_rows is not None
        assert unit.experts is not None
        [name], [target] = group.sources, group.targets
        value = self._read_rows(name, unit.experts).to(self.device)
        loaded.buffers[target].copy_(value.mT if group.turned else value)
        same = loaded.buffers[target].dtype == value.dtype and not group.turned
        loaded.sources[name] = loaded.buffers[target] if same else value

    def attach(self, loaded: Loaded) -> None:
        """Put a loaded unit into the model."""
        for entry in loaded.unit.entries:
            resolved = self._names.resolve(entry)
            if resolved in loaded.buffers:
                set_entry(self._model, entry, loaded.buffers[resolved], like=self._blank[entry])

    def detach(self, unit: Unit) -> None:
        """Put a unit's entries back to what they were before `attach`."""
        for entry in unit.entries:
            set_entry(self._model, entry, self._blank[entry], like=self._blank[entry])

    def release(self, loaded: Loaded) -> None:
        """Give a loaded unit's memory back; from any thread, once nothing reads it any more."""
        room = loaded.room
        loaded.buffers.clear()
        loaded.sources.clear()
        loaded.room = room.new_empty(0)
        self._rooms.give_back(room, pool=_pool(loaded.unit))

    def _read_to(self, name: str, out: Tensor | None) -> Tensor:
        """Read a tensor in the dtype on disk, and put it into ``out``, which may have another."""
        if out is not None and out.dtype == self._dtype_on_disk(name):
            return self._read(name, out)
        value = self._read(name, None).to(self.device)
        if out is not None:
            out.copy_(value)
        return value

    def _layout(
        self, unit: Unit
    ) -> tuple[list[TensorGroup], list[tuple[str, int, torch.Size, torch.dtype]], int]:
        """Return a unit's groups, the place of every target in its room, and the room's bytes."""
        found = (self._names.by_target.get(self._names.resolve(e)) for e in unit.entries)
        groups = list({id(group): group for group in found if group is not None}.values())
        places, end = [], 0
        for group in groups:
            for target in group.targets:
                blank = self._blank[target]
                dtype = self._dtype_for(target, group, blank)
                shape = blank.shape
                if unit.is_stacked and unit.experts is not None:
                    shape = torch.Size((len(unit.experts), *shape[1:]))
                places.append((target, end, shape, dtype))
                size = shape.numel() * dtype.itemsize
                end += -(-size // _ALIGN) * _ALIGN
        return groups, places, end

    def _dtype_for(self, target: str, group: TensorGroup, blank: Tensor) -> torch.dtype:
        """The model's dtype, but for entries that keep the disk's and for whole numbers."""
        on_disk = self._dtype_on_disk(group.sources[0])
        if self._keep_dtype(target) or not blank.dtype.is_floating_point:
            return on_disk
        return blank.dtype


def of_experts(group: TensorGroup, experts: range | None) -> TensorGroup:
    """Return only some experts of a stacked parameter, counted from the first of them."""
    assert experts is not None
    pieces = [
        Piece(p.source, (p.region[0] - experts.start, *p.region[1:]))
        for p in group.pieces
        if isinstance(p.region[0], int) and p.region[0] in experts
    ]
    sources = tuple(piece.source for piece in pieces)
    return TensorGroup(sources, group.targets, pieces=tuple(pieces))


def _pool(unit: Unit) -> str | None:
    """Units of one pool are of about the same size, and take turns in the same memory."""
    if unit.parent is not None:
        return "parts"
    return "layers" if unit.is_layer else None


class Rooms:
    """Memory for units; those of a pool take turns in blocks that are kept, others get their own.

    Kept blocks keep the peak at a few layers whatever the depth: freed and allocated again, blocks
    of slightly different sizes would fragment the heap.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._lock = threading.Lock()
        self._free: dict[str, list[Tensor]] = {}

    def take(self, size: int, *, pool: str | None) -> Tensor:
        """Return uint8 [size] or larger, uninitialized; from any thread."""
        if pool is not None:
            with self._lock:
                free = self._free.setdefault(pool, [])
                for index, room in enumerate(free):
                    if room.numel() >= size:
                        return free.pop(index)
                free.clear()  # too small, all of them: the larger one takes their place
        return torch.empty(size, dtype=torch.uint8, device=self._device)

    def give_back(self, room: Tensor, *, pool: str | None) -> None:
        """Let others have what `take` gave; from any thread."""
        if pool is not None:
            with self._lock:
                self._free.setdefault(pool, []).append(room)


def set_entry(model: nn.Module, entry: str, value: Tensor, *, like: Tensor) -> None:
    """Make ``value`` the parameter or buffer called ``entry``; ``like`` says which of the two."""
    path, _, leaf = entry.rpartition(".")
    module = model.get_submodule(path)
    if isinstance(like, nn.Parameter):
        parameter = value if value is like else nn.Parameter(value, requires_grad=False)
        module._parameters[leaf] = parameter
    else:
        module._buffers[leaf] = value
