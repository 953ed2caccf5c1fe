"""Bring labels in one by one, each to memory of its own; what needs no plan."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from torch import Tensor

from modelopt_lite.offload.cargo import Cargo, storage_of
from modelopt_lite.offload.device import Device
from modelopt_lite.offload.ledger import Ledger
from modelopt_lite.offload.nesting import Nest

log = logging.getLogger("modelopt_lite.offload")

B = TypeVar("B")


@dataclass(slots=True)
class Entry(Generic[B]):
    """A label that is in: its block, or memory of its own where its block was taken."""

    block: B | None
    views: tuple[Tensor, ...]
    versions: tuple[int, ...]
    own: Tensor | None = None
    depth: int = 1


@dataclass(slots=True)
class LoaderCounts:
    """What happened since the loader was made."""

    hits: int = 0
    misses: int = 0
    copies: int = 0
    bytes_copied: int = 0
    by_label: dict[str, int] = field(default_factory=dict)


def storage_of_entry(entry: Entry[B] | None) -> int | None:
    """Return the address of the storage that a label's weights are in."""
    return None if entry is None else storage_of(entry.views[0])


class DirectLoader:
    """Brings each label in when it enters and lets it go when it leaves: no blocks, no order.

    What discovery and profiling use, before there is a plan. ``nests`` gets what was in at once.
    """

    def __init__(
        self, device: Device, cargos: Mapping[str, Cargo], ledger: Ledger, nests: set[Nest]
    ) -> None:
        self._nests = nests
        self._device = device
        self._cargos = dict(cargos)
        self._ledger = ledger
        self._inside: dict[str, Entry[None]] = {}
        self.counts = LoaderCounts()

    def enter(self, label: str) -> None:
        """Copy a label's weights to memory of its own; a second enter changes nothing."""
        cargo = self._cargos.get(label)
        if cargo is None:
            return
        if label in self._inside:
            self._inside[label].depth += 1
            return
        own = bring_apart(self._device, self._ledger, cargo)
        self.counts.copies += 1
        self.counts.bytes_copied += cargo.nbytes
        views = cargo.views(own)
        cargo.bind(views)
        self._inside[label] = Entry(None, views, cargo.versions, own)
        if len(self._inside) > 1:
            self._nests.add(tuple(self._inside))

    def exit(self, label: str) -> None:
        """Let a label's weights go when it was left as often as entered."""
        entry = self._inside.get(label)
        if entry is None or entry.own is None:
            return
        entry.depth -= 1
        if entry.depth:
            return
        del self._inside[label]
        cargo = self._cargos[label]
        cargo.write_back(entry.views, entry.versions)
        cargo.unbind()
        give_back(self._device, self._ledger, label, entry.own)

    def block_of(self, label: str) -> int | None:
        """See `BlockLoader.block_of`."""
        return storage_of_entry(self._inside.get(label))

    def is_in(self, label: str) -> bool:
        """Whether a label was entered and not left."""
        return label in self._inside

    def join(self) -> None:
        """Do nothing: no copy is on its way when `enter` has returned."""

    def close(self) -> None:
        """Let every label go."""
        for label, entry in list(self._inside.items()):
            entry.depth = 1
            self.exit(label)


def bring_apart(device: Device, ledger: Ledger, cargo: Cargo) -> Tensor:
    """Copy a cargo to memory of its own, before the caller's next operation."""
    cargo.adopt()
    own = device.allocate(cargo.nbytes)
    try:
        for target, source in cargo.copies(own):
            device.copy(target, source, None, label=cargo.label)
    except BaseException:
        device.free(own)
        raise
    ledger.add("device", cargo.label, cargo.nbytes)
    return own


def give_back(device: Device, ledger: Ledger, label: str, own: Tensor) -> None:
    """Free memory of a label's own, once its compute has ended."""
    done = device.event()
    device.record(done)
    device.synchronize(done)
    device.free(own)
    ledger.remove("device", label, own.numel())


def settle(device: Device) -> None:
    """Wait for all copies; log those that failed."""
    try:
        device.synchronize()
    except Exception as error:
        log.warning("a copy that is not needed any more failed: %s", error)
