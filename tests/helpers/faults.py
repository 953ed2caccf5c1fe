"""Let calls into the system fail, one after another, as a disk or a kernel may.

A `Fault` stands before every function through which a run writes or reads, counts the calls that
concern a folder, and fails at one of them.
"""

from __future__ import annotations

import builtins
import errno
import io
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

READS = ("pread", "preadv")


class Fault:
    """Counts calls, and raises at one of them.

    Args:
        folder: Calls that name a path count where it lies in here; those that name a descriptor,
            where that is open on a file in here.
        at: Number of the call that fails, from 0; None for none of them.
        number: Of the error.
        lasting: Whether all later ones fail, too, as on a full disk.
    """

    def __init__(
        self, folder: Path, at: int | None, number: int = errno.ENOSPC, *, lasting: bool = True
    ) -> None:
        self.folder = str(folder.resolve())
        self.at = at
        self.number = number
        self.lasting = lasting
        self.calls: list[str] = []

    def strike(self, what: str, path: Any) -> None:
        """Count a call, if it concerns the folder, and fail if it is its turn."""
        if not self._inside(path):
            return
        self.calls.append(f"{what} {path}")
        turn = len(self.calls) - 1
        if self.at is not None and (turn == self.at or (self.lasting and turn > self.at)):
            raise OSError(self.number, os.strerror(self.number), str(path))

    def _inside(self, path: Any) -> bool:
        if isinstance(path, int):
            try:
                path = Path(f"/proc/self/fd/{path}").readlink()
            except OSError:
                return False
        return str(Path.cwd() / os.fspath(path)).startswith(self.folder)


@contextmanager
def failing_writes(fault: Fault) -> Iterator[None]:
    """Put a fault before everything that writes."""
    with pytest.MonkeyPatch.context() as patch:
        for owner, name, place in (
            (os, "pwrite", 0),
            (os, "fsync", 0),
            (os, "fdatasync", 0),
            (os, "posix_fallocate", 0),
            (os, "mkdir", 0),
            (os, "rename", 1),
            (shutil, "copyfile", 1),
        ):
            patch.setattr(owner, name, _before(getattr(owner, name), name, place, fault))
        real_open, real_os_open = io.open, os.open

        def opened(file: Any, mode: str = "r", *args: Any, **options: Any) -> Any:
            if isinstance(file, str | os.PathLike) and set(mode) & set("wax+"):
                fault.strike("open", file)
            return real_open(file, mode, *args, **options)

        def os_opened(path: Any, flags: int, *args: Any, **options: Any) -> int:
            if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
                fault.strike("os.open", path)
            return real_os_open(path, flags, *args, **options)

        patch.setattr(io, "open", opened)
        patch.setattr(builtins, "open", opened)
        patch.setattr(os, "open", os_opened)
        yield


@contextmanager
def failing_reads(fault: Fault) -> Iterator[None]:
    """Put a fault before the reads of weights."""
    with pytest.MonkeyPatch.context() as patch:
        for name in READS:
            patch.setattr(os, name, _before(getattr(os, name), name, 0, fault))
        yield


def _before(real: Callable[..., Any], name: str, place: int, fault: Fault) -> Callable[..., Any]:
    def call(*args: Any, **options: Any) -> Any:
        if len(args) > place:
            fault.strike(name, args[place])
        return real(*args, **options)

    return call
