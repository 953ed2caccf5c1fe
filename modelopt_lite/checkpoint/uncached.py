"""Read a file past the page cache.

A weight that is read once a pass, of a model larger than memory, is gone from the page cache before
it is asked for again. Going through the cache then costs a core's time for nothing: pages are
allocated, copied from, and dropped, which takes ten times as long as the disk's own transfer
(docs/performance.md).

Memory that lies as the file does, page by page, is read into directly. Other memory gets its bytes
through a small window that lies so.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

ALIGN = 4096  # of positions, sizes and addresses; no disk asks for more
ROOM = 2 << 20  # bytes of a window; stays in the second-level cache
AHEAD = 2  # windows on their way while one is copied from: a disk wants more than one request
_MOST = 1 << 30  # one preadv moves at most 2 GiB - 4 KiB on Linux
_PRIVATE = getattr(mmap, "MAP_PRIVATE", 0) | getattr(mmap, "MAP_ANONYMOUS", 0)
WORTH_A_REQUEST = 1 << 20  # smaller ones lose a third of a disk's rate
FLAG = getattr(os, "O_DIRECT", 0)  # 0: the system has no such reads


class _Window:
    """A part of a file in page-aligned memory."""

    def __init__(self) -> None:
        # Private, for it to be a huge page, which a disk fills by one request.
        room = mmap.mmap(-1, 2 * ROOM, flags=_PRIVATE)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with suppress(OSError):
                room.madvise(mmap.MADV_HUGEPAGE)
        whole = np.frombuffer(room, np.uint8)
        self.bytes = whole[-whole.ctypes.data % ROOM :][:ROOM]
        self.start = self.end = 0

    def fill(self, fd: int, start: int, size: int = ROOM) -> _Window:
        self.start = self.end = start
        self.end += os.preadv(fd, [self.bytes.data[:size]], start)
        return self


class _Forward:
    """A window that moves over a file, and those ahead of it where reads follow one another."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self._pool = pool
        self._idle = [_Window() for _ in range(AHEAD)]
        self._ahead: deque[tuple[int, _Window, Future[_Window]]] = deque()
        self.window = _Window()
        self.path: Path | None = None
        self.last = 0  # where the last read ended

    def holds(self, path: Path, at: int) -> bool:
        return self.path == path and self.window.start <= at < self.window.end

    def move(self, fd: int, path: Path, at: int, wanted: int, *, alone: bool) -> None:
        """Have the window at ``at``: what is wanted, and more where reads follow one another."""
        start = at - at % ALIGN
        size = min(-(-(at + wanted - start) // ALIGN) * ALIGN, ROOM)
        goes_on = not alone and self.path == path and 0 <= at - self.last < ALIGN
        if goes_on and self._ahead and self._ahead[0][0] == start:
            self._idle.append(self.window)
            _, self.window, filled = self._ahead.popleft()
            self.path = None  # until it has been read
            filled.result()
        else:
            self.forget()
            self.window.fill(fd, start, ROOM if goes_on else size)
        self.path = path
        if goes_on or wanted > ROOM:
            following = self._ahead[-1][0] + ROOM if self._ahead else self.window.end
            while self._idle and following % ALIGN == 0:  # not at the end of the file
                window = self._idle.pop()
                job = self._pool.submit(window.fill, fd, following)
                self._ahead.append((following, window, job))
                following += ROOM

    def forget(self) -> None:
        """Give up what was read."""
        self.path = None
        while self._ahead:
            _, window, job = self._ahead.popleft()
            with suppress(OSError):
                job.result()
            self._idle.append(window)


def lies_alike(address: int, start: int) -> bool:
    """Whether bytes from ``start`` of a file can be read to an address without a window."""
    return (address - start) % ALIGN == 0


class UncachedReader:
    """Reads whole pages to where they belong, and through small windows what cannot be read so.

    Windows are a few for each thread.
    """

    def __init__(self) -> None:
        self._local = threading.local()
        self._pool: ThreadPoolExecutor | None = None
        self._made: list[_Forward] = []
        self._lock = threading.Lock()

    def read(self, fd: int, path: Path, start: int, buffer: memoryview) -> int:
        """Read into a buffer until it is full or the file ends.

        Args:
            fd: Opened with `FLAG`; stays open until `close`.
            path: The file, which must not change: some of it may have been read before.
            start: The first byte to read.
            buffer: Where to put them; any address and size.

        Returns:
            Bytes read; fewer than the buffer has where the file ends.

        Raises:
            OSError: The read failed; EINVAL where the file system has no such reads.
        """
        into, head = np.frombuffer(buffer, np.uint8), -start % ALIGN
        pages = (len(into) - head) // ALIGN * ALIGN
        if not lies_alike(into.ctypes.data, start) or pages < WORTH_A_REQUEST:
            return self._through_windows(fd, path, start, into)
        done = self._through_windows(fd, path, start, into[:head], alone=True)
        while head <= done < head + pages:
            part = buffer[done : min(done + _MOST, head + pages)]
            count = os.preadv(fd, [part], start + done)
            done += count
            if not count or count % ALIGN:
                break
        if done != head + pages:  # the file ends before
            return done
        return done + self._through_windows(fd, path, start + done, into[done:], alone=True)

    def _through_windows(
        self,
        fd: int,
        path: Path,
        start: int,
        into: np.ndarray[Any, np.dtype[np.uint8]],
        *,
        alone: bool = False,
    ) -> int:
        """Read as `read` does; ``alone``, what follows is not read ahead."""
        forward = self._of_this_thread()
        done = 0
        while done < len(into):
            at = start + done
            if not forward.holds(path, at):
                forward.move(fd, path, at, len(into) - done, alone=alone)
                if not forward.holds(path, at):
                    break
            window = forward.window
            count = min(window.end - at, len(into) - done)
            # numpy copies without the interpreter's lock, and on this thread alone.
            np.copyto(into[done : done + count], window.bytes[at - window.start :][:count])
            done += count
            forward.last = at + count
        return done

    def close(self) -> None:
        """Forget what was read ahead; no thread may be reading. To be called before files close."""
        with self._lock:
            for forward in self._made:
                forward.forget()

    def _of_this_thread(self) -> _Forward:
        if not hasattr(self._local, "forward"):
            with self._lock:
                self._pool = self._pool or ThreadPoolExecutor(AHEAD, "uncached-read")
                self._local.forward = _Forward(self._pool)
                self._made.append(self._local.forward)
        forward: _Forward = self._local.forward
        return forward
