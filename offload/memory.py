"""Keep the process's memory from growing with the number of layers."""

from __future__ import annotations

import ctypes
import os
import sys

_M_MMAP_THRESHOLD = -3
_KERNEL_CACHE = "64"


def bound_caches() -> None:
    """Bound what grows with depth although no layer holds it.

    oneDNN keeps a compiled kernel for each number of rows it has seen, and experts see many: 600
    MB after 40 layers. glibc keeps freed blocks of varying size in its heap. The first is bounded
    through oneDNN's own variables, read at its first product; a value that the user set stays.
    """
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", _KERNEL_CACHE)
    os.environ.setdefault("LRU_CACHE_CAPACITY", _KERNEL_CACHE)
    if (libc := _glibc()) is not None:
        libc.mallopt(_M_MMAP_THRESHOLD, 1 << 20)


def release_freed() -> None:
    """Give freed memory back to the system."""
    if (libc := _glibc()) is not None:
        libc.malloc_trim(0)


def _glibc() -> ctypes.CDLL | None:
    if not sys.platform.startswith("linux"):
        return None
    libc = ctypes.CDLL(None)
    return libc if hasattr(libc, "malloc_trim") else None
