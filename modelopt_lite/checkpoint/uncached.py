"""Read a file past the page cache.

A weight that is read once a pass, of a model larger than memory, is gone from the page cache before
it is asked for again. Going through the cache then costs a core's time for nothing: pages are
allocated, copied from, and dropped, which takes ten times as long as the disk's own transfer
(docs/performance.md).
"""

from __future__ import annotations

import mmap
import os
import threading
from pathlib import Path

import numpy as np

ALIGN = 4096  # of positions, sizes and addresses; no disk asks for more
ROOM = 4 << 20  # bytes; stays in the second-level cache, and keeps a disk at its full rate
FLAG = getattr(os, "O_DIRECT", 0)  # 0: the system has no such reads


class _Window:
    """A part of a file in page-aligned memory, and where the last read ended."""

    def __init__(self) -> None:
        self.room = mmap.mmap(-1, ROOM)
        self.bytes = np.frombuffer(self.room, np.uint8)
        self.path: Path | None = None
        self.start = self.end = self.last = 0

    def holds(self, path: Path, at: int) -> bool:
        return self.path == path and self.start <= at < self.end

    def move(self, fd: int, path: Path, at: int, wanted: int) -> None:
        """Read from ``at`` on: what is wanted, and more where reads follow one another."""
        forward = self.path == path and 0 <= at - self.last < ALIGN
        start = at - at % ALIGN
        size = ROOM if forward else min(-(-(at + wanted - start) // ALIGN) * ALIGN, ROOM)
        self.path = None  # until it has been read
        count = os.preadv(fd, [memoryview(self.room)[:size]], start)
        self.path, self.start, self.end = path, start, start + count


class UncachedReader:
    """Reads through a small aligned window, one for each thread."""

    def __init__(self) -> None:
        self._local = threading.local()

    def read(self, fd: int, path: Path, start: int, buffer: memoryview) -> int:
        """Read into a buffer until it is full or the file ends.

        Args:
            fd: Opened with `FLAG`.
            path: The file, which must not change: some of it may have been read before.
            start: The first byte to read.
            buffer: Where to put them; any address and size.

        Returns:
            Bytes read; fewer than the buffer has where the file ends.

        Raises:
            OSError: The read failed; EINVAL where the file system has no such reads.
        """
        if not hasattr(self._local, "window"):
            self._local.window = _Window()
        window: _Window = self._local.window
        into, done = np.frombuffer(buffer, np.uint8), 0
        while done < len(buffer):
            at = start + done
            if not window.holds(path, at):
                window.move(fd, path, at, len(buffer) - done)
                if not window.holds(path, at):
                    break
            count = min(window.end - at, len(buffer) - done)
            # numpy copies without the interpreter's lock, and on this thread alone.
            np.copyto(into[done : done + count], window.bytes[at - window.start :][:count])
            done += count
            window.last = at + count
        return done
