"""Put tensors away until they are asked for again: in memory up to a budget, on disk beyond it."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from modelopt_lite.checkpoint.reader import byte_view
from modelopt_lite.errors import OutputError


@dataclass(slots=True, eq=False)
class Kept:
    """A tensor on a shelf: its values, or where in the file they lie."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    value: Tensor | None
    at: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the values."""
        return self.shape.numel() * self.dtype.itemsize


class Shelf:
    """Keeps copies of tensors in host memory and, what comes when that is full, in one file.

    Args:
        budget: Bytes in memory; None: no limit.
        folder: Where the file goes; it has no name, and vanishes with the process.
        disk_budget: The most bytes on disk; None: what the disk has.

    Attributes:
        peak: The most bytes that were in memory at a time.
        disk_peak: The same on disk.
    """

    def __init__(self, budget: int | None, folder: Path, disk_budget: int | None = None) -> None:
        self._budget = budget
        self._folder = folder
        self._disk_budget = disk_budget
        self._fd: int | None = None
        self._end = 0
        self._holes: dict[int, list[int]] = {}  # bytes -> places of what was taken
        self._in_memory = self._on_disk = self.peak = self.disk_peak = 0

    def __enter__(self) -> Shelf:
        return self

    def __exit__(self, *error: object) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def put(self, value: Tensor) -> Kept:
        """Keep a copy of a tensor.

        Raises:
            OutputError: It does not fit on the disk.
        """
        kept = Kept(value.shape, value.dtype, value.device, None)
        if self._budget is None or self._in_memory + kept.nbytes <= self._budget:
            kept.value = value.detach().to("cpu", copy=True).contiguous()
            self._in_memory += kept.nbytes
            self.peak = max(self.peak, self._in_memory)
            return kept
        if self._disk_budget is not None and self._on_disk + kept.nbytes > self._disk_budget:
            raise OutputError(
                f"kept activations need more than the {self._disk_budget:,} bytes of disk_scratch; "
                "give more disk_scratch or host_memory, or fewer calibration tokens (calib_size, "
                "calib_seq_len)"
            )
        self._write(kept, value.detach().cpu().contiguous())
        self._on_disk += kept.nbytes
        self.disk_peak = max(self.disk_peak, self._on_disk)
        return kept

    def take(self, kept: Kept) -> Tensor:
        """Return a tensor that was put, where it came from; it is no longer kept."""
        value = self.look(kept).to(kept.device)
        if kept.value is not None:
            self._in_memory -= kept.nbytes
            kept.value = None
        else:
            self._holes.setdefault(kept.nbytes, []).append(kept.at)
            self._on_disk -= kept.nbytes
        return value

    def look(self, kept: Kept) -> Tensor:
        """Return the values of a tensor that stays kept, on the host; not to be written."""
        if kept.value is not None:
            return kept.value
        value = torch.empty(kept.shape, dtype=kept.dtype)
        if kept.nbytes:
            data, done = byte_view(value), 0
            while done < len(data):
                done += os.preadv(self._fd or 0, [data[done : done + (1 << 30)]], kept.at + done)
        return value

    def _write(self, kept: Kept, value: Tensor) -> None:
        holes = self._holes.get(kept.nbytes)
        kept.at = holes.pop() if holes else self._end
        try:
            if self._fd is None:
                self._fd, path = tempfile.mkstemp(dir=self._folder)
                Path(path).unlink()
            if kept.nbytes:
                data, done = byte_view(value), 0
                while done < len(data):
                    done += os.pwritev(self._fd, [data[done : done + (1 << 30)]], kept.at + done)
        except OSError as error:
            raise OutputError(
                f"kept activations cannot be written to {self._folder} ({error.strerror}); free "
                "some space there, or give more host_memory"
            ) from error
        self._end = max(self._end, kept.at + kept.nbytes)
