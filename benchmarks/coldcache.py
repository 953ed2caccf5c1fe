"""Keep files out of the page cache, and see whether they are."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterable
from pathlib import Path


def drop(paths: Iterable[Path]) -> None:
    """Ask the system to forget the pages of files."""
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def cached_bytes(paths: Iterable[Path]) -> int:
    """Return how many bytes of files the page cache has, as mincore(2) tells."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]
    pages = 0
    for path in paths:
        size = path.stat().st_size
        fd = os.open(path, os.O_RDONLY)
        try:
            at = libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, fd, 0)
            found = ctypes.create_string_buffer(-(-size // mmap.PAGESIZE))
            if libc.mincore(at, size, found):
                raise OSError(ctypes.get_errno(), f"mincore of {path} failed")
            libc.munmap(at, size)
        finally:
            os.close(fd)
        pages += sum(page & 1 for page in found.raw[: -(-size // mmap.PAGESIZE)])
    return pages * mmap.PAGESIZE
