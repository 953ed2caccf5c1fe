"""Write a checkpoint whose every byte has its place before the first one is written.

``plan_layout`` fixes shards, headers and offsets from names, dtypes and shapes alone;
``StreamingWriter`` makes the files at full size and puts each tensor at its offset as it comes.
So the order of writing cannot change the files, and a full disk is found at the start.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from modelopt_lite.checkpoint.header import TensorInfo
from modelopt_lite.checkpoint.reader import INDEX_FILE, byte_view
from modelopt_lite.checkpoint.shards import ShardFile, ShardLayout
from modelopt_lite.errors import InternalError, OutputError, RecipeError

_UNITS = {"": 1, "B": 1}
for _power, _letter in enumerate("KMGT", start=1):
    _UNITS[f"{_letter}B"] = 1000**_power
    _UNITS[f"{_letter}IB"] = 1024**_power
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", re.ASCII)
_NO_FALLOCATE = {errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS, errno.ENODEV}


def parse_size(value: str | int) -> int:
    """Return a size in bytes.

    Args:
        value: A count of bytes, or a number with a unit: B, KB, MB, GB, TB (powers of 1000) or
            KiB, MiB, GiB, TiB (powers of 1024), in any case. Fractions of a byte are cut.

    Raises:
        RecipeError: Not such a size, or less than one byte.
    """
    match = _SIZE.fullmatch(str(value))
    factor = _UNITS.get(match[2].upper()) if match else None
    if match is None or factor is None:
        raise RecipeError(f"size {value!r} is not understood; write 10GB, 512MiB or 5000000000")
    whole, _, fraction = match[1].partition(".")
    size: int = int(whole + fraction) * factor // 10 ** len(fraction)
    if size < 1:
        raise RecipeError(f"size {value!r} is less than one byte; write 10GB, 512MiB or 5000000000")
    return size


_CLAIMED, _DONE = 1, 2  # how far a tensor is


@dataclass(frozen=True, slots=True)
class Slot:
    """A tensor to be written, and its number in the layout."""

    info: TensorInfo
    number: int


class StreamingWriter:
    """Write the tensors of a layout in any order, from any thread.

    The files are made at full size when the writer is. ``finish`` completes the checkpoint;
    leaving the ``with`` block without it closes the files and leaves them incomplete, for the
    owner of the folder to remove.

    Args:
        folder: Where the files go.
        layout: What they hold.
        written: Tensors that an earlier writer has written to files in the folder, which then
            must be there in full size.
        made: The files are there in any case: another process has made them.

    Raises:
        OutputError: The folder cannot be written, a file exists already (or, with ``written``,
            does not or has another size), or the disk is too small; files made until then are
            removed.
    """

    def __init__(
        self,
        folder: Path,
        layout: ShardLayout,
        *,
        written: Iterable[str] = (),
        made: bool = False,
    ) -> None:
        self.folder = Path(folder)
        self.layout = layout
        self._tensors = layout.tensors
        self._states = bytearray(len(layout.tensors))
        self._lock = threading.Lock()
        self._fds: dict[str, int] = {}
        for name in written:
            self.mark(name)
        self._goes_on = made or _DONE in self._states
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            for file in layout.files:
                self._open(file)
        except OSError as error:
            begun = [] if self._goes_on else list(self._fds)
            self.close()
            for name in begun:
                (self.folder / name).unlink(missing_ok=True)
            raise self._output_error(error) from error

    def __enter__(self) -> StreamingWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def mark(self, name: str) -> None:
        """Take note that another writer has written a tensor."""
        self._states[self._number(name)] = _DONE

    def write(self, name: str, tensor: Tensor, *, again: bool = False) -> None:
        """Write a tensor of any device and strides.

        Args:
            name: A name of the layout.
            tensor: Its values, in the planned dtype and shape.
            again: It may have been written before; the last values stay.

        Raises:
            InternalError: A name out of the layout or, unless ``again``, written already;
                another dtype or shape than planned; a tensor without data (meta device).
            OutputError: The write failed.
        """
        slot = self.claim(name, tensor.dtype, tuple(tensor.shape), again=again)
        self.fill(slot, tensor)

    def claim(
        self, name: str, dtype: torch.dtype, shape: tuple[int, ...], *, again: bool = False
    ) -> Slot:
        """Take the place of a tensor, to `fill` it later from any thread; see `write`."""
        number = self._number(name)
        planned = self._tensors.at(number)
        if (planned.dtype, planned.shape) != (dtype, shape):
            raise InternalError(
                f"tensor {name!r} was planned as {planned.dtype} {list(planned.shape)} but came as "
                f"{dtype} {list(shape)}"
            )
        with self._lock:
            if self._states[number] and not again:
                raise InternalError(f"tensor {name!r} was written twice")
            self._states[number] = self._states[number] or _CLAIMED
        return Slot(planned, number)

    def fill(self, slot: Slot, tensor: Tensor) -> None:
        """Write a tensor into the slot that `claim` gave for it."""
        if tensor.device.type == "meta":
            raise InternalError(
                f"tensor {slot.info.name!r} reached the writer without data (meta device)"
            )
        if slot.info.numel:
            data = byte_view(tensor.detach().to("cpu").contiguous())
            try:
                _pwrite(self._fds[str(slot.info.file)], data, slot.info.start)
            except OSError as error:
                raise self._output_error(error) from error
        self._states[slot.number] = _DONE

    def _number(self, name: str) -> int:
        number = self._tensors.find(name)
        if number is None:
            raise InternalError(f"tensor {name!r} is not part of the planned checkpoint")
        return number

    def is_claimed(self, name: str) -> bool:
        """Whether a tensor of the layout was written, or is about to be."""
        number = self._tensors.find(name)
        return number is not None and bool(self._states[number])

    def sync(self) -> None:
        """Bring what was written so far to the disk.

        Raises:
            OutputError: The disk failed.
        """
        try:
            for fd in self._fds.values():
                os.fdatasync(fd)
        except OSError as error:
            raise self._output_error(error) from error

    def finish(self) -> None:
        """Check that every tensor was written, write the index, and bring all to the disk.

        Raises:
            InternalError: Tensors are missing.
            OutputError: The write failed.
        """
        missing = [number for number, state in enumerate(self._states) if state != _DONE]
        if missing:
            raise InternalError(
                f"{len(missing)} of {len(self._states)} planned tensors were never written, "
                f"the first is {self._tensors.name(missing[0])!r}"
            )
        try:
            for fd in self._fds.values():
                os.fsync(fd)
            if index := self.layout.index:
                with (self.folder / INDEX_FILE).open("xb") as file:
                    file.write(index)
                    file.flush()
                    os.fsync(file.fileno())
            _sync_folder(self.folder)
        except OSError as error:
            raise self._output_error(error) from error
        self.close()

    def close(self) -> None:
        """Close the files without a check; ``finish`` does it by itself."""
        while self._fds:
            os.close(self._fds.popitem()[1])

    def _open(self, file: ShardFile) -> None:
        path = self.folder / file.name
        if self._goes_on:
            fd = self._fds[file.name] = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            if (size := os.fstat(fd).st_size) != file.size:
                raise OutputError(
                    f"{path} has {size} bytes, {file.size} were begun; start anew with "
                    "resume=False (--no-resume)"
                )
            return
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        fd = self._fds[file.name] = os.open(path, flags, 0o666)
        try:
            os.posix_fallocate(fd, 0, file.size)
        except OSError as error:
            if error.errno not in _NO_FALLOCATE:
                raise
            os.ftruncate(fd, file.size)
        _pwrite(fd, memoryview(file.header()), 0)

    def _output_error(self, error: OSError) -> OutputError:
        if error.errno == errno.EEXIST:
            return OutputError(f"{error.filename}: exists already; remove it or choose another")
        if error.errno in {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}:
            free = shutil.disk_usage(self.folder).free
            return OutputError(
                f"{self.folder}: the weights need {self.layout.total_bytes} bytes, {free} are "
                f"free ({error.strerror}); free some space or choose another export_dir"
            )
        return OutputError(
            f"{self.folder}: cannot be written ({error.strerror or error}); check the folder's "
            "permissions and the disk, or choose another export_dir"
        )


def _pwrite(fd: int, data: memoryview, offset: int) -> None:
    """Write all of ``data``; the kernel may take less at a time (2 GiB at most)."""
    done = 0
    while done < len(data):
        done += os.pwrite(fd, data[done:], offset + done)


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
