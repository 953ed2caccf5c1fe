"""Units of a model, and the store that brings their weights in from a checkpoint and lets them go.

Units partition the entries (parameters and persistent buffers) of a model: every decoder layer is
a unit, and outside of layers every module without children that holds entries. What a module with
children holds itself, outside of layers, is brought in at the start and stays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from modelopt_lite.checkpoint.fill import read_entries
from modelopt_lite.checkpoint.names import NameMap, TensorGroup

_ALIGN = 64  # bytes; a cache line, and enough for every dtype


@dataclass(frozen=True, slots=True)
class Unit:
    """A module whose entries come and go together."""

    name: str
    entries: tuple[str, ...]
    is_layer: bool


def find_units(model: nn.Module, layer_names: Iterable[str]) -> list[Unit]:
    """Split a model into units, in the order of ``named_modules``.

    Args:
        model: Any model; entries are those of its ``state_dict``.
        layer_names: Class names of decoder layers, compared with each module's class and its bases
            without regard to case. Where none is found, the children of the longest ModuleList
            of the text model that lies in no other one are taken.
    """
    wanted = {name.lower() for name in layer_names}
    named = [
        name
        for name, module in model.named_modules()
        if wanted & {cls.__name__.lower() for cls in type(module).__mro__}
    ]
    layers = set(_outermost(named) or _repeated_children(model))
    leaves = _leaf_names(model)
    entries: dict[str, list[str]] = {}
    for entry in model.state_dict(keep_vars=True):
        path = entry.rpartition(".")[0]
        unit = next((p for p in _prefixes(path) if p in layers), None) or leaves.get(path, "")
        entries.setdefault(unit, []).append(entry)
    names = [*(name for name, _ in model.named_modules() if name), ""]
    return [Unit(n, tuple(entries[n]), n in layers) for n in names if n in entries]


def _leaf_names(model: nn.Module) -> dict[str, str]:
    """Map every name of each module without children to its first one; a module may have many."""
    first = {id(module): name for name, module in model.named_modules()}
    return {
        name: first[id(module)]
        for name, module in model.named_modules(remove_duplicate=False)
        if next(module.children(), None) is None
    }


def _prefixes(name: str) -> Iterator[str]:
    """Yield a dotted name's beginnings, the shortest first."""
    end = name.find(".")
    while end >= 0:
        yield name[:end]
        end = name.find(".", end + 1)
    yield name


def _outermost(names: list[str]) -> list[str]:
    """Leave out names below other ones; those above come first."""
    kept: dict[str, None] = {}
    for name in names:
        if not any(prefix in kept for prefix in _prefixes(name)):
            kept[name] = None
    return list(kept)


def text_model(model: Any) -> Any:
    """Return what a composite model, with a vision tower say, runs text through; else the model."""
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "get_text_config") or config.get_text_config() is config:
        return model
    return model.get_decoder()


def output_head(model: Any) -> tuple[str, Any] | None:
    """Return the name and the module that turns hidden states into logits, if there is one."""
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    if head is None:
        return None
    return next(((name, m) for name, m in model.named_modules() if m is head), None)


def _repeated_children(model: nn.Module) -> list[str]:
    inside = set(text_model(model).modules())
    lists = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) and module in inside
    ]
    outer = set(_outermost([name for name, _ in lists]))
    candidates = [(len(module), name) for name, module in lists if name in outer]
    if not candidates:
        return []
    size, name = max(candidates, key=lambda pair: pair[0])
    return [f"{name}.{index}" for index in range(size)]


class WeightStore:
    """Brings units' entries from a checkpoint into a model, and takes them out again.

    Args:
        model: The model, on the meta device; its entries are replaced while a unit is in.
        names: The correspondence of the model's entries and the tensors on disk.
        read: ``read(name, out)`` reads one tensor from the checkpoint.
        keep_dtype: Whether an entry keeps the disk's dtype rather than the model's.
        device: Where the weights go.
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
    ) -> None:
        self._model = model
        self._names = names
        self._read = read
        self._keep_dtype = keep_dtype
        self._dtype_on_disk = dtype_on_disk
        self._device = device
        self._blank = model.state_dict(keep_vars=True)
        self._arena: Tensor | None = None
        self._arena_unit: str | None = None

    def bring_in(self, unit: Unit) -> dict[str, Tensor]:
        """Read a unit's tensors and put them into the model.

        Returns:
            Name on disk -> values in the dtype on disk. Where the model holds them unchanged, they
            are views of its memory, valid until `take_out`.
        """
        groups, buffers = self._allocate(unit)
        sources: dict[str, Tensor] = {}
        for group in groups:
            read_entries(group, self._read_to, buffers, keep=sources.__setitem__)
        for entry in unit.entries:
            resolved = self._names.resolve(entry)
            if resolved in buffers:
                set_entry(self._model, entry, buffers[resolved], like=self._blank[entry])
        return sources

    def take_out(self, unit: Unit) -> None:
        """Put a unit's entries back to where they were before `bring_in`; frees its memory."""
        for entry in unit.entries:
            set_entry(self._model, entry, self._blank[entry], like=self._blank[entry])
        if unit.name == self._arena_unit:
            self._arena_unit = None

    def _read_to(self, name: str, out: Tensor | None) -> Tensor:
        """Read a tensor in the dtype on disk, and put it into ``out``, which may have another."""
        if out is not None and out.dtype == self._dtype_on_disk(name):
            return self._read(name, out)
        value = self._read(name, None).to(self._device)
        if out is not None:
            out.copy_(value)
        return value

    def _allocate(self, unit: Unit) -> tuple[list[TensorGroup], dict[str, Tensor]]:
        """Give every target of the unit's groups its room, in the reused arena where it is free."""
        found = (self._names.by_target.get(self._names.resolve(e)) for e in unit.entries)
        groups = list({id(group): group for group in found if group is not None}.values())
        plans, end = [], 0
        for group in groups:
            for target in group.targets:
                blank = self._blank[target]
                dtype = self._dtype_for(target, group, blank)
                plans.append((target, end, blank.shape, dtype))
                size = blank.numel() * dtype.itemsize
                end += -(-size // _ALIGN) * _ALIGN
        room = self._room(end, unit)
        buffers = {
            target: room[start : start + shape.numel() * dtype.itemsize].view(dtype).view(shape)
            for target, start, shape, dtype in plans
        }
        return groups, buffers

    def _dtype_for(self, target: str, group: TensorGroup, blank: Tensor) -> torch.dtype:
        """The model's dtype, but for entries that keep the disk's and for whole numbers."""
        on_disk = self._dtype_on_disk(group.sources[0])
        if self._keep_dtype(target) or not blank.dtype.is_floating_point:
            return on_disk
        return blank.dtype

    def _room(self, size: int, unit: Unit) -> Tensor:
        """Bytes for one unit: layers of equal size take turns in one arena, others get their own.

        One arena keeps the peak at one layer whatever the depth: freed and allocated again, blocks
        of slightly different sizes would fragment the heap.
        """
        if not unit.is_layer or self._arena_unit is not None:
            return torch.empty(size, dtype=torch.uint8, device=self._device)
        if self._arena is None or self._arena.numel() < size:
            self._arena = None  # before the new one, so that both never exist together
            self._arena = torch.empty(size, dtype=torch.uint8, device=self._device)
        self._arena_unit = unit.name
        return self._arena


def set_entry(model: nn.Module, entry: str, value: Tensor, *, like: Tensor) -> None:
    """Make ``value`` the parameter or buffer called ``entry``; ``like`` says which of the two."""
    path, _, leaf = entry.rpartition(".")
    module = model.get_submodule(path)
    if isinstance(like, nn.Parameter):
        parameter = value if value is like else nn.Parameter(value, requires_grad=False)
        module._parameters[leaf] = parameter
    else:
        module._buffers[leaf] = value
