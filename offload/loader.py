"""Bring labels' weights in before they compute, as far ahead as blocks allow.

Copies run one after another on one stream, in the order of next use. A block is handed on only
after the last compute that used it. A label that comes in another order than expected is brought in
at once: slower, counted in ``misses``, and right.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from torch import Tensor

from modelopt_lite.errors import InternalError, OffloadError
from modelopt_lite.offload.cargo import Cargo
from modelopt_lite.offload.device import Device, Event
from modelopt_lite.offload.directloader import (
    Entry,
    LoaderCounts,
    bring_apart,
    give_back,
    settle,
    storage_of_entry,
)
from modelopt_lite.offload.ledger import BLOCKS, Ledger
from modelopt_lite.offload.nesting import idle_block
from modelopt_lite.offload.timeline import Timeline


@dataclass(slots=True)
class Block:
    """A slot: its memory, whose bytes it has, and how far they are.

    ``size`` is what the plan gives it; ``used``, that something computed with its content.
    """

    index: int
    size: int
    memory: Tensor
    ready: Event
    last_use: Event
    content: str | None = None
    versions: tuple[int, ...] = ()  # of the content's tensors when its bytes were read
    users: int = 0
    used: bool = False

    def has(self, cargo: Cargo) -> bool:
        """Whether the block holds a cargo's bytes as they are now."""
        return self.content == cargo.label and self.versions == cargo.versions


class BlockLoader:
    """Moves cargos through pre-allocated blocks.

    Args:
        device: Where to.
        order: All labels in the order in which they are expected to compute, pass after pass.
        cargos: Label -> what it needs brought in; a label without is a gap.
        blocks: Label with a cargo -> index of its block.
        sizes: Index of a block -> bytes.
        ledger: Where blocks are accounted for.
        timeline: Where copies and computes are recorded.

    Attributes:
        spare: Bytes that labels inside of others may still take beside the blocks. None: any.
        counts: What happened so far.
    """

    def __init__(
        self,
        device: Device,
        order: Sequence[str],
        cargos: Mapping[str, Cargo],
        blocks: Mapping[str, int],
        sizes: Mapping[int, int],
        ledger: Ledger,
        timeline: Timeline | None = None,
    ) -> None:
        self._device = device
        self.spare: int | None = None
        self._order = list(order)
        self._position = {label: at for at, label in enumerate(self._order)}
        self._cargos = dict(cargos)
        self._stream = device.stream("copy")
        self._ledger = ledger
        self._timeline = timeline
        self._blocks: dict[int, Block] = {}
        self._block_of: dict[str, Block] = {}
        self._entries: dict[str, Entry[Block]] = {}
        self._at = -1
        self.counts = LoaderCounts()
        self._views: dict[str, tuple[Tensor, ...]] = {}
        try:
            self._make_blocks(blocks, sizes)
        except BaseException:
            self.close()
            raise

    def _make_blocks(self, blocks: Mapping[str, int], sizes: Mapping[int, int]) -> None:
        for index, size in sizes.items():
            memory = self._first_memory(size)
            events = self._device.event(), self._device.event()
            self._blocks[index] = Block(index, size, memory, *events)
        for label, index in blocks.items():
            self._block_of[label] = self._blocks[index]
        for label, cargo in self._cargos.items():
            if cargo.nbytes > self._block_of[label].size:
                raise InternalError(f"{label!r} does not fit its block: {cargo.nbytes} bytes")

    def _first_memory(self, size: int) -> Tensor:
        """Return what a block has before anything is copied to it."""
        return self._allocate(size)

    def _allocate(self, size: int) -> Tensor:
        memory = self._device.allocate(size)
        self._ledger.add("device", BLOCKS, size)
        return memory

    def _free(self, memory: Tensor) -> None:
        self._device.free(memory)
        self._ledger.remove("device", BLOCKS, memory.numel())

    def _views_in(self, cargo: Cargo, block: Block) -> tuple[Tensor, ...]:
        """Return a cargo's tensors in a block; those in its own are made once."""
        if block is not self._block_of[cargo.label]:
            return cargo.views(block.memory)
        if cargo.label not in self._views:
            self._views[cargo.label] = cargo.views(block.memory)
        return self._views[cargo.label]

    @property
    def block_bytes(self) -> int:
        """Bytes of all blocks."""
        return sum(block.memory.numel() for block in self._blocks.values())

    @property
    def unclaimed_bytes(self) -> int:
        """Bytes that the plan gives to blocks, and that they have not allocated now."""
        return sum(block.size for block in self._blocks.values()) - self.block_bytes

    def enter(self, label: str) -> None:
        """Have a label's weights in before this returns, as the compute stream sees it."""
        self._at = self._position.get(label, self._at)
        cargo = self._cargos.get(label)
        if cargo is not None:
            entry = self._entries.get(label)
            if entry is not None:
                entry.depth += 1
                return
            self._entries[label] = self._bring_in(cargo)
        try:
            self._look_ahead()
        except BaseException:
            self.exit(label)
            raise

    def block_of(self, label: str) -> int | None:
        """Return the address of the storage that a label's weights are in now; None: nowhere."""
        return storage_of_entry(self._entries.get(label))

    def join(self) -> None:
        """Let the compute stream wait for every copy that was queued so far."""
        if self._blocks:
            event = self._device.event()
            self._device.record(event, self._stream)
            self._device.wait(event)

    def exit(self, label: str) -> None:
        """Let a label's weights go; their block may be handed on once its compute has ended."""
        cargo, entry = self._cargos.get(label), self._entries.get(label)
        if cargo is None or entry is None:
            return
        entry.depth -= 1
        if entry.depth:
            return
        del self._entries[label]
        cargo.write_back(entry.views, entry.versions)
        cargo.unbind()
        if entry.block is not None:
            entry.block.versions = cargo.versions
            self._device.record(entry.block.last_use)
            entry.block.used = True
            entry.block.users -= 1
        elif entry.own is not None:
            give_back(self._device, self._ledger, label, entry.own)
            if self.spare is not None:
                self.spare += entry.own.numel()
        if self._blocks:
            self._look_ahead()

    def close(self) -> None:
        """Let every label go and free the blocks. A copy that failed is logged: nobody needs it."""
        settle(self._device)
        blocks, self._blocks = self._blocks, {}  # nothing is looked ahead for any more
        for label in list(self._entries):
            self._entries[label].depth = 1
            self.exit(label)
        settle(self._device)
        for block in blocks.values():
            if block.memory.numel():
                self._free(block.memory)
        self._block_of.clear()
        self._views.clear()
        self._cargos.clear()

    def _bring_in(self, cargo: Cargo) -> Entry[Block]:
        block = self._block_of[cargo.label]
        if cargo.adopt() and block.content == cargo.label:
            block.content = None
        if block.has(cargo):
            self.counts.hits += 1
        else:
            self.counts.misses += 1
            if block.users:
                other = self._idle_block(cargo)
                if other is None:
                    return self._bring_apart(cargo)
                block = other
            self._issue(cargo, block)
        try:
            self._device.wait(block.ready)
        except BaseException:
            block.content = None  # what is in it now is nobody's
            raise
        block.users += 1
        views = self._views_in(cargo, block)
        cargo.bind(views)
        return Entry(block, views, block.versions)

    def _idle_block(self, cargo: Cargo) -> Block | None:
        """A block for a label whose own is taken; what was copied to it ahead is copied again."""
        sizes = {index: block.size for index, block in self._blocks.items()}
        busy = {index for index, block in self._blocks.items() if block.users}
        index = idle_block(cargo.nbytes, sizes, busy)
        return None if index is None else self._blocks[index]

    def _bring_apart(self, cargo: Cargo) -> Entry[Block]:
        """Memory of its own for a label, as no block is free that is large enough."""
        if self.spare is not None and cargo.nbytes > self.spare:
            outer = [label for label in self._entries if label != cargo.label]
            raise OffloadError(
                f"{cargo.label!r} runs inside of {outer}, which was not seen while profiling: it "
                f"needs {cargo.nbytes:,} bytes beside the blocks, and the budget leaves "
                f"{self.spare:,}; raise it by {cargo.nbytes - self.spare:,} bytes"
            )
        own = bring_apart(self._device, self._ledger, cargo)
        if self.spare is not None:
            self.spare -= cargo.nbytes
        self._count(cargo)
        views = cargo.views(own)
        cargo.bind(views)
        return Entry(None, views, cargo.versions, own)

    def _issue(self, cargo: Cargo, block: Block) -> None:
        """Queue a copy into a block that nobody computes with any more."""
        if cargo.label not in self._entries:  # its tensors are at rest
            cargo.adopt()
        if block.used:
            self._device.wait(block.last_use, self._stream)
        block.content = None
        versions = cargo.versions
        with self._span(cargo, block):
            for target, source in cargo.copies(block.memory):
                self._device.copy(target, source, self._stream, label=cargo.label)
        self._device.record(block.ready, self._stream)
        block.content, block.versions = cargo.label, versions
        self._count(cargo)

    def _span(self, cargo: Cargo, block: Block) -> AbstractContextManager[None]:
        if self._timeline is None:
            return nullcontext()
        return self._timeline.span(
            "copy", cargo.label, self._stream, slot=block.index, nbytes=cargo.nbytes
        )

    def _count(self, cargo: Cargo) -> None:
        self.counts.copies += 1
        self.counts.bytes_copied += cargo.nbytes
        self.counts.by_label[cargo.label] = self.counts.by_label.get(cargo.label, 0) + 1

    def _look_ahead(self) -> None:
        """Queue copies for the labels to come, until one's block is still needed before it."""
        claimed: set[int] = set()
        for step in range(1, len(self._order)):
            label = self._order[(self._at + step) % len(self._order)]
            cargo = self._cargos.get(label)
            if cargo is None:
                continue
            block = self._block_of[label]
            if block.users or block.index in claimed:
                return
            claimed.add(block.index)
            if not block.has(cargo):
                self._issue(cargo, block)
