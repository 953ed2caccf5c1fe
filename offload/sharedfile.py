"""A file in shared memory that several processes map: one copy of the weights on a machine.

Who may do what is settled by locks of the system, which end with the process that holds them,
however it ends. Each user has a shared lock (``flock``) on the file. Whoever ends and gets the
exclusive one was the last, and removes the file; one that was killed leaves that to the next
process that shares weights, which removes what nobody uses. A second lock, for writing (an open
file description lock, ``fcntl``), lets one user at a time fill the file; who gets it and finds a
first page that does not say that the file is complete does so, be it after one that was killed.
"""

from __future__ import annotations

import fcntl
import hashlib
import mmap
import os
import struct
import time
import weakref
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from modelopt_lite.errors import OffloadError

FOLDER = Path("/dev/shm")
HEADER = mmap.PAGESIZE  # bytes before the first tensor
_MAGIC = b"modelopt-lite shared weights, format 1\n"
_POLL_SECONDS = 0.01


class SharedFile:
    """The bytes that all processes share which give the same namespace and layout.

    Args:
        namespace: Chosen by the user.
        layout: All that the places of the bytes depend on; another layout is another file.
        nbytes: How many they are.
        wait_timeout: Seconds to wait for the process that writes; 0: as long as it lives.
        private: Whether what this process writes into them later stays with it (copy on write).
            Otherwise all see it; an accelerator can only read from such memory.

    Attributes:
        bytes: uint8 [nbytes].
        writing: Whether this process has to fill them, and then to call `complete`.

    Raises:
        OffloadError: There is no such memory on this system, or too little; the file is another
            user's; or the process that writes takes too long.
    """

    def __init__(
        self, namespace: str, layout: str, nbytes: int, *, wait_timeout: float, private: bool
    ) -> None:
        if not FOLDER.is_dir():
            raise OffloadError(
                f"shm_enabled needs {FOLDER}, which this system lacks; set shm_enabled=False"
            )
        self._digest = hashlib.sha256(f"{namespace}\0{layout}\0{nbytes}".encode()).hexdigest()
        self.path = FOLDER / f"{_prefix()}{_short(namespace)}-{self._digest[:32]}"
        self._size = HEADER + nbytes
        cleanup_unused(keep=self.path)
        self._file = self._open()
        self._finalizer = weakref.finalize(self, _leave, self._file, self.path, os.getpid())
        try:
            self._written: Tensor | None = None
            self.writing = self._must_write(wait_timeout)
            if self.writing:
                self._reserve()
                self._written = self._map(mmap.MAP_SHARED)
            self.bytes = self._map(mmap.MAP_PRIVATE if private else mmap.MAP_SHARED)
        except BaseException:
            self._finalizer()
            raise

    def write(self, offset: int, values: Tensor) -> None:
        """Put bytes, uint8 [B], at an offset."""
        assert self._written is not None
        self._written[offset : offset + values.numel()].copy_(values)

    def complete(self) -> None:
        """Let others use the bytes."""
        if self.writing:
            self._written = None
            os.pwrite(self._file, self._mark, 0)
            self.writing = False
            fcntl.fcntl(self._file, fcntl.F_OFD_SETLK, _lock(fcntl.F_UNLCK))

    def close(self) -> None:
        """Stop to use the file, and remove it where nobody else does. What is mapped stays so."""
        self._finalizer()

    @property
    def _mark(self) -> bytes:
        """The beginning of a complete file."""
        return _MAGIC + self._digest.encode() + b"\n"

    def _open(self) -> int:
        """Open the file and become one of its users."""
        while True:
            try:
                file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
            except OSError as error:
                raise OffloadError(f"{self.path} cannot be shared: {error}") from error
            fcntl.flock(file, fcntl.LOCK_SH)
            if _is_at(file, self.path):
                return file
            os.close(file)  # its last user has removed it meanwhile

    def _must_write(self, timeout: float) -> bool:
        """Wait for whoever writes; return whether that is left to this process, as the only one."""
        deadline = time.monotonic() + timeout
        if not timeout:
            fcntl.fcntl(self._file, fcntl.F_OFD_SETLKW, _lock(fcntl.F_WRLCK))
        while timeout and not self._try_to_write():
            if time.monotonic() >= deadline:
                raise OffloadError(
                    f"another process still writes {self.path}; raise shm_wait_timeout, or set it "
                    "to 0 to wait as long as that one lives"
                )
            time.sleep(_POLL_SECONDS)
        if os.pread(self._file, len(self._mark), 0) != self._mark:
            return True
        fcntl.fcntl(self._file, fcntl.F_OFD_SETLK, _lock(fcntl.F_UNLCK))
        return False

    def _try_to_write(self) -> bool:
        try:
            fcntl.fcntl(self._file, fcntl.F_OFD_SETLK, _lock(fcntl.F_WRLCK))
        except (BlockingIOError, PermissionError):
            return False
        return True

    def _reserve(self) -> None:
        """Have all memory at once: later, a lack of it would end the process without a word."""
        os.ftruncate(self._file, 0)
        space = os.statvfs(FOLDER)
        free = space.f_bavail * space.f_frsize
        try:
            if free >= self._size:
                os.posix_fallocate(self._file, 0, self._size)
                return
            reason = f"{free:,} are free"
        except OSError as error:
            reason = str(error)
        raise OffloadError(
            f"the shared weights take {self._size:,} bytes of {FOLDER}, and {reason}; enlarge it "
            "(mount -o remount,size=..., or docker run --shm-size=...) or set shm_enabled=False"
        )

    def _map(self, flag: int) -> Tensor:
        """Map the bytes behind the header."""
        flag |= getattr(mmap, "MAP_NORESERVE", 0)
        # Opened anew: a mapping keeps a duplicate of its file, which would hold the lock with it.
        file = os.open(self.path, os.O_RDWR | os.O_NOFOLLOW)
        try:
            mapped = np.frombuffer(mmap.mmap(file, self._size, flag), np.uint8)
        finally:
            os.close(file)
        with torch.inference_mode(False):
            return torch.from_numpy(mapped)[HEADER:]


def cleanup_unused(namespace: str | None = None, *, keep: Path | None = None) -> list[Path]:
    """Remove this user's shared weights that no process uses: what killed processes have left.

    Args:
        namespace: Of these alone; None: of all.
        keep: A file to leave where it is.

    Returns:
        What was removed.
    """
    prefix = _prefix() + ("" if namespace is None else f"{_short(namespace)}-")
    removed = []
    for path in FOLDER.glob(f"{prefix}*"):
        if path == keep:
            continue
        try:
            file = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
        except OSError:
            continue  # gone meanwhile, or not ours
        if _leave(file, path, os.getpid()):
            removed.append(path)
    return removed


def _leave(file: int, path: Path, process: int) -> bool:
    """Close a file, and remove it where nobody else has it; return whether it was removed.

    In a forked child the lock is the parent's, and stays as it is.
    """
    removed = False
    try:
        if os.getpid() == process:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if removed := _is_at(file, path):
                path.unlink()
    except BlockingIOError:
        pass  # someone uses it
    finally:
        os.close(file)
    return removed


def _lock(kind: int) -> bytes:
    """Return a ``struct flock`` for the whole file."""
    return struct.pack("hhqqi0q", kind, os.SEEK_SET, 0, 0, 0)


def _is_at(file: int, path: Path) -> bool:
    """Whether an open file is the one of its path still."""
    try:
        there = path.stat()
    except FileNotFoundError:
        return False
    here = os.fstat(file)
    return (here.st_dev, here.st_ino) == (there.st_dev, there.st_ino)


def _prefix() -> str:
    return f"modelopt-lite-{os.getuid()}-"


def _short(namespace: str) -> str:
    return hashlib.sha256(namespace.encode()).hexdigest()[:12]
