"""Keep what suspended passes hold within a budget: the rest lies on disk until they go on.

A pass that waits for a unit holds its hidden states. Their memory is given back by shrinking the
storage to nothing, behind every tensor that looks into it; before the pass goes on, the storage is
grown again and filled with the same bytes. Only what enters a unit first is moved, the stream of
hidden states: other arguments (masks, positions) may belong to several passes.
"""

from __future__ import annotations

import os
import tempfile
import weakref
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from modelopt_lite.checkpoint.reader import byte_view
from modelopt_lite.errors import OutputError

_SMALL = 1 << 16  # bytes; what is smaller stays


@dataclass(slots=True)
class _Held:
    """What one pass holds.

    Attributes:
        seen: Storages that entered its units, as long as something refers to them.
        in_memory: Bytes that are counted as waiting in memory.
        on_disk: Storages that were moved, their sizes and their places in the file.
        fd: The file.
    """

    seen: list[weakref.ref[torch.UntypedStorage]] = field(default_factory=list)
    in_memory: int = 0
    on_disk: list[tuple[torch.UntypedStorage, int, int]] = field(default_factory=list)
    fd: int | None = None


class Waiting:
    """Moves hidden states of suspended passes to disk where they exceed a budget.

    The pass that was suspended last is the one that goes on last, so it is the one to move.

    Args:
        budget: Bytes of waiting hidden states in memory.
        folder: Where scratch files go; they have no name, and vanish with the process.
        disk_budget: The most bytes on disk; None: what the disk has.
        smallest: Tensors of fewer bytes stay where they are.

    Attributes:
        peak: The most bytes of waiting hidden states that were in memory at a time.
        disk_peak: The same on disk.
    """

    def __init__(
        self,
        budget: int,
        folder: Path,
        disk_budget: int | None = None,
        *,
        smallest: int = _SMALL,
    ) -> None:
        self._budget = budget
        self._folder = folder
        self._disk_budget = disk_budget
        self._smallest = smallest
        self._passes: dict[int, _Held] = {}
        self._in_memory = self._on_disk = self.peak = self.disk_peak = 0

    def __enter__(self) -> Waiting:
        return self

    def __exit__(self, *error: object) -> None:
        for held in self._passes.values():
            if held.fd is not None:
                os.close(held.fd)
        self._passes.clear()

    def suspend(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Take note of what a pass holds that waits from now on, and move it where it is too much.

        Args:
            index: The pass.
            args: What enters the unit that it waits for,
            kwargs: by position and by name.

        Raises:
            OutputError: It does not fit on the disk.
        """
        held = self._passes.setdefault(index, _Held())
        alive = [storage for ref in held.seen if (storage := ref()) is not None]
        first = next((v for v in (*args, *kwargs.values()) if isinstance(v, Tensor)), None)
        if first is not None and first.device.type == "cpu" and first.is_floating_point():
            entering = first.untyped_storage()
            if entering.nbytes() >= self._smallest and all(s is not entering for s in alive):
                alive.append(entering)
        held.seen = [weakref.ref(storage) for storage in alive]
        size = sum(storage.nbytes() for storage in alive)
        if self._in_memory + size > self._budget:
            self._move(held, alive)
            return
        held.in_memory = size
        self._in_memory += size
        self.peak = max(self.peak, self._in_memory)

    def resume(self, index: int) -> None:
        """Bring back what a pass holds that goes on now."""
        held = self._passes.get(index)
        if held is None:
            return
        self._in_memory -= held.in_memory
        held.in_memory = 0
        for storage, size, at in held.on_disk:
            storage.resize_(size)
            _transfer(os.preadv, held.fd, storage, at)
            self._on_disk -= size
        held.on_disk = []

    def _move(self, held: _Held, storages: list[torch.UntypedStorage]) -> None:
        at = 0
        for storage in storages:
            size = storage.nbytes()
            if self._disk_budget is not None and self._on_disk + size > self._disk_budget:
                raise OutputError(
                    f"waiting activations need more than the {self._disk_budget:,} bytes of "
                    "disk_scratch; give more disk_scratch or host_memory, or fewer calibration "
                    "tokens (calib_size, calib_seq_len)"
                )
            try:
                if held.fd is None:
                    held.fd = _unnamed_file(self._folder)
                _transfer(os.pwritev, held.fd, storage, at)
                storage.resize_(0)
            except OSError as error:
                raise OutputError(
                    f"waiting activations cannot be written to {self._folder} ({error.strerror}); "
                    "free some space there, or give more host_memory"
                ) from error
            held.on_disk.append((storage, size, at))
            at += size
            self._on_disk += size
        self.disk_peak = max(self.disk_peak, self._on_disk)


def _unnamed_file(folder: Path) -> int:
    fd, path = tempfile.mkstemp(dir=folder)
    Path(path).unlink()
    return fd


def _transfer(move: Any, fd: int | None, storage: torch.UntypedStorage, at: int) -> None:
    """Read or write a whole storage."""
    data = byte_view(torch.empty(0, dtype=torch.uint8).set_(storage))
    done = 0
    while done < len(data):
        done += move(fd, [data[done : done + (1 << 30)]], at + done)
