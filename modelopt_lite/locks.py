"""Folders that one process has at a time; the system lets go of them when the process ends."""

from __future__ import annotations

import fcntl
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from modelopt_lite.errors import OutputError

OWNER = "owner"  # in a held folder: the process that has it, for messages alone


@contextmanager
def held(folder: Path, doing: str, choose: str) -> Iterator[None]:
    """Make a folder and hold it against other processes that do.

    Args:
        folder: The block may remove it.
        doing: What another process does where that has it, for the message.
        choose: What else to choose, for the message.

    Raises:
        OutputError: Another process has it, or it cannot be made.
    """
    fd = _hold(folder, doing, choose)
    try:
        with suppress(OSError):
            owner = f"{os.getpid()} {platform.node()}\n"
            (folder / OWNER).write_text(owner, encoding="utf-8")
        yield
    finally:
        if _is_at(fd, folder):
            with suppress(OSError):
                (folder / OWNER).unlink(missing_ok=True)
        os.close(fd)


@contextmanager
def awaited(folder: Path) -> Iterator[None]:
    """Hold a folder that is there, once all other processes that do so have ended."""
    fd = _open(folder)
    try:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _hold(folder: Path, doing: str, choose: str) -> int:
    """Return a descriptor that holds the folder; it is made where it is not there.

    A process that ends may remove the folder: whoever opened it before would hold what is gone,
    while others make it anew and hold that.
    """
    while True:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OutputError(
                f"cannot make a folder in {folder.parent}: {error.strerror}"
            ) from error
        try:
            fd = _open(folder)
        except FileNotFoundError:
            continue  # another process has ended
        except OSError as error:
            raise OutputError(f"{folder}: cannot be opened: {error.strerror}") from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(fd)
            raise OutputError(
                f"another run{_owner_of(folder)} {doing}; wait for it, or choose another {choose}"
            ) from error
        except OSError:
            pass  # a file system without locks
        if _is_at(fd, folder):
            return fd
        os.close(fd)


def _open(folder: Path) -> int:
    return os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)


def _is_at(fd: int, path: Path) -> bool:
    """Whether an open folder is the one of its path still."""
    try:
        there = path.stat()
    except OSError:
        return False
    return os.path.samestat(there, os.fstat(fd))


def _owner_of(folder: Path) -> str:
    """Return the words that name the process which has a folder, as far as it is known."""
    try:
        pid, _, host = (folder / OWNER).read_text(encoding="utf-8").strip().partition(" ")
    except (OSError, UnicodeDecodeError):
        return ""
    return f" (process {pid}{f' on {host}' if host != platform.node() else ''})" if pid else ""
