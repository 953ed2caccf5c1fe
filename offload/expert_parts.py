"""Split the routed experts of a layer into parts that come in one after another.

The model's own forward runs unchanged: it is suspended where it asks for an expert that is not in
memory, and goes on when that expert's part is. So results are bit-equal to those of the whole
layer. Experts are parts of stacked parameters (transformers 5), or modules of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from modelopt_lite.checkpoint.names import NameMap
from modelopt_lite.offload.store import Loaded
from modelopt_lite.offload.units import Unit


def split_experts(unit: Unit, model: nn.Module, names: NameMap, size: int) -> list[Unit]:
    """Split a layer into its experts, ``size`` at a time, and the rest of it, which comes first.

    Args:
        unit: A layer.
        model: The model, on the meta device.
        names: Where its entries lie on disk; an expert's values must be tensors of their own.
        size: Experts a part.

    Returns:
        The layer itself, alone, where it has no such experts.
    """
    stacked: dict[str, list[str]] = {}
    single: dict[str, dict[int, list[str]]] = {}
    for entry in unit.entries:
        if _is_stacked(entry, names):
            stacked.setdefault(entry.rpartition(".")[0], []).append(entry)
        elif (place := _place_in_list(entry, unit, model)) is not None:
            path, index = place
            single.setdefault(path, {}).setdefault(index, []).append(entry)
    parts = []
    for path, entries in stacked.items():
        count = model.get_parameter(entries[0]).shape[0]
        for start in range(0, count, size):
            rows = range(start, min(start + size, count))
            parts.append(_part(unit, path, rows, count, entries, is_stacked=True))
    for path, by_index in single.items():
        count = len(by_index)
        for start in range(0, count, size):
            rows = range(start, min(start + size, count))
            inside = [entry for index in rows for entry in by_index[index]]
            parts.append(_part(unit, path, rows, count, inside, is_stacked=False))
    if not parts:
        return [unit]
    taken = {entry for part in parts for entry in part.entries}
    rest = replace(unit, entries=tuple(entry for entry in unit.entries if entry not in taken))
    return [rest, *parts]


def split_stacks(
    unit: Unit, model: nn.Module, names: NameMap, stacks: Collection[str], size: int
) -> list[Unit]:
    """Split a layer whose experts are rows of tensors on disk, as `split_experts` does others.

    Args:
        unit: A layer.
        model: The model, on the meta device.
        names: Where its entries lie on disk.
        stacks: Entries that hold all experts; the others of their module are split with them.
        size: Experts a part.
    """
    parts: list[Unit] = []
    taken: set[str] = set()
    for path in dict.fromkeys(e.rpartition(".")[0] for e in unit.entries if e in stacks):
        entries = [e for e in unit.entries if e.rpartition(".")[0] == path]
        count = model.get_parameter(entries[0]).shape[0]
        groups = [names.by_target[entry] for entry in entries]
        rows_alike = all(
            g.turned or (len(g.pieces) == 1 and not g.pieces[0].region) for g in groups
        )
        if not rows_alike or any(model.get_parameter(e).shape[0] != count for e in entries):
            continue
        taken.update(entries)
        for start in range(0, count, size):
            rows = range(start, min(start + size, count))
            part = _part(unit, path, rows, count, entries, is_stacked=True)
            parts.append(replace(part, of_stack=True))
    if not parts:
        return [unit]
    rest = replace(unit, entries=tuple(entry for entry in unit.entries if entry not in taken))
    return [rest, *parts]


def joined(units: Sequence[Unit]) -> list[Unit]:
    """Undo `split_experts` for many layers: each with all of their experts."""
    of_parts: dict[str, dict[str, None]] = {}
    for unit in units:
        if unit.parent is not None:
            of_parts.setdefault(unit.parent, {}).update(dict.fromkeys(unit.entries))
    return [
        replace(unit, entries=(*unit.entries, *of_parts.get(unit.name, {})))
        for unit in units
        if unit.parent is None
    ]


def _part(
    unit: Unit, path: str, rows: range, count: int, entries: list[str], *, is_stacked: bool
) -> Unit:
    return Unit(
        f"{path}[{rows.start}:{rows.stop}]",
        tuple(entries),
        is_layer=False,
        parent=unit.name,
        experts=rows,
        container=path,
        is_stacked=is_stacked,
        count=count,
    )


def _is_stacked(entry: str, names: NameMap) -> bool:
    """Whether a parameter is filled from tensors that belong to one expert each."""
    group = names.by_target.get(entry)
    return (
        group is not None
        and bool(group.pieces)
        and all(piece.region and isinstance(piece.region[0], int) for piece in group.pieces)
    )


def _place_in_list(entry: str, unit: Unit, model: nn.Module) -> tuple[str, int] | None:
    """Return the list of experts that an entry lies in, and its position there."""
    parts = entry.split(".")
    for at in range(len(unit.name.split(".")), len(parts) - 1):
        path = ".".join(parts[:at])
        if parts[at].isdecimal() and parts[at - 1].endswith("experts"):
            owner = model.get_submodule(path)
            if isinstance(owner, nn.ModuleList):
                return path, int(parts[at])
    return None


class ExpertRows(TorchFunctionMode):
    """Serves single experts of stacked parameters of which only some rows are in memory.

    Models that ask a weight for its device may do so before the weight is in, and would move their
    inputs to the meta device, where the values are lost and products give what memory holds by
    chance. Nothing is moved there, and nothing is made there.

    Args:
        model: The model; its stacked parameters stay on the meta device.
        parts: The parts.
        device: Where units compute.
        want: Called with a part's name when one of its experts is asked for and not in memory; on
            return it is.
    """

    def __init__(
        self,
        model: nn.Module,
        parts: Iterable[Unit],
        device: torch.device,
        want: Callable[[str], None],
    ) -> None:
        super().__init__()
        self._want = want
        self._device = device
        self._entries = WeakTensorKeyDictionary()
        self._parts: dict[str, dict[int, str]] = {}
        self._rows: dict[str, tuple[range, Tensor]] = {}
        for part in parts:
            for entry in part.entries if part.is_stacked else ():
                self._entries[model.get_parameter(entry)] = entry
                of_expert = self._parts.setdefault(entry, {})
                of_expert.update(dict.fromkeys(part.experts or (), part.name))

    def attach(self, loaded: Loaded) -> None:
        """Serve a part's experts."""
        assert loaded.unit.experts is not None
        for entry in loaded.unit.entries:
            self._rows[entry] = loaded.unit.experts, loaded.buffers[entry]

    def detach(self, part: Unit) -> None:
        """Serve them no longer."""
        for entry in part.entries:
            self._rows.pop(entry, None)

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Look at one torch function call."""
        name = getattr(func, "__name__", "")
        if name == "to":
            return _moved(func(*args, **(kwargs or {})), args[0])
        if kwargs and _is_meta(kwargs.get("device")):
            kwargs = {**kwargs, "device": self._device}
        if name != "__getitem__" or not isinstance(args[0], Tensor):
            return func(*args, **(kwargs or {}))
        entry = self._entries.get(args[0])
        first, *rest = args[1] if isinstance(args[1], tuple) else (args[1],)
        if entry is None or not is_number(first):
            return func(*args, **(kwargs or {}))
        expert = int(first) % len(args[0])
        rows, values = self._served(entry, expert)
        return func(values, (expert - rows.start, *rest))

    def _served(self, entry: str, expert: int) -> tuple[range, Tensor]:
        found = self._rows.get(entry)
        if found is None or expert not in found[0]:
            self._want(self._parts[entry][expert])
            found = self._rows[entry]
        return found


def _is_meta(device: Any) -> bool:
    return device is not None and torch.device(device).type == "meta"


def _moved(moved: Tensor, before: Tensor) -> Tensor:
    """Return what ``Tensor.to`` gave, or where that has no values, the tensor in its dtype."""
    return before.to(moved.dtype) if moved.is_meta and not before.is_meta else moved


def is_number(index: Any) -> bool:
    """Whether an index picks one row."""
    return (isinstance(index, int) and not isinstance(index, bool)) or (
        isinstance(index, Tensor) and index.ndim == 0
    )
