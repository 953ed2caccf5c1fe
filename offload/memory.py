"""Keep the process's memory from growing with the number of layers."""

from __future__ import annotations

import ctypes
import os
import sys
from contextlib import suppress
from pathlib import Path

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # malloc.h
_MADV_NOHUGEPAGE = 15  # mman.h
_PARAMETER = 1 << 20
_ACTIVATION = 4 << 20
_TOP = 16 << 20
_HOLES = (16 << 20, 4 << 20, 1 << 20, 256 << 10, 64 << 10)
_MOST = 32 << 20  # the highest threshold that glibc takes for blocks of their own
MOST_KEPT = 2 * _MOST  # freed bytes that stay at the heap's end after `keep_freed`
_KERNEL_CACHE = "64"


def map_large_blocks() -> None:
    """Have blocks of a megabyte or more mapped, and given back to the system when they are freed.

    To be called before a model is built: each parameter is a block for a moment, until it is on the
    meta device. glibc takes blocks from its heap once it has seen one of their size freed; what is
    allocated between two of them then spreads over their room, by huge pages that torch asked for:
    half a megabyte more for each layer.
    """
    if (libc := _glibc()) is not None:
        libc.mallopt(_M_MMAP_THRESHOLD, _PARAMETER)


def bound_caches() -> None:
    """Bound what grows with depth although no layer holds it.

    oneDNN keeps a compiled kernel for each number of rows it has seen, and experts see many: 600
    MB after 40 layers. It is bounded through oneDNN's own variables, read at its first product; a
    value that the user set stays.

    glibc serves activations from holes that earlier work left in its heap, and such pages stay in
    the process when they are freed: 100 MB more or less by chance. With the holes filled, blocks of
    4 MB or more are mapped, and go back to the system at once. Smaller ones at the heap's end do
    when there are 16 MB of them: activations and the temporaries of one piece of a matrix, taken
    and freed thousands of times, would else be new pages each time. Threads share one heap: each
    would else have one of its own, with holes of its own.
    """
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", _KERNEL_CACHE)
    os.environ.setdefault("LRU_CACHE_CAPACITY", _KERNEL_CACHE)
    if (libc := _glibc()) is not None:
        libc.mallopt(_M_ARENA_MAX, 1)
        libc.malloc_trim(0)
        _fill_holes(libc)
        libc.mallopt(_M_MMAP_THRESHOLD, _ACTIVATION)
        libc.mallopt(_M_TRIM_THRESHOLD, _TOP)
        _use_small_pages(libc)


def keep_freed() -> None:
    """Keep the memory of temporaries for those that follow, where there are no layers.

    glibc comes to this by itself once a block of its highest threshold was freed; until then a
    thread gives the end of its heap back after each piece of a matrix, and gets new pages for it.
    """
    if (libc := _glibc()) is not None:
        libc.mallopt(_M_MMAP_THRESHOLD, _MOST)
        libc.mallopt(_M_TRIM_THRESHOLD, MOST_KEPT)


def release_freed() -> None:
    """Give freed memory back to the system."""
    if (libc := _glibc()) is not None:
        libc.malloc_trim(0)


class _HeapInfo(ctypes.Structure):
    """``struct mallinfo2`` of glibc 2.33 and later."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    )


def _fill_holes(libc: ctypes.CDLL) -> None:
    """Take every large hole of the heap for good, without touching it: it costs addresses only.

    The end of the heap tells whether a block came from a hole. glibc's own account would, too, but
    it walks all holes each time, which takes minutes in a process of a day.
    """
    libc.mallopt(_M_MMAP_THRESHOLD, _MOST)  # what follows must come from the heap
    for size in _HOLES:
        for _ in range(libc.mallinfo2().fordblks // size + 1):
            end = libc.sbrk(0)
            block = libc.malloc(size)
            if libc.sbrk(0) != end:  # no hole was left, the heap grew instead
                libc.free(ctypes.c_void_p(block))
                break


def _use_small_pages(libc: ctypes.CDLL) -> None:
    """Keep huge pages out of what the heap is now.

    torch asks for them where a tensor lies, and the system goes on to put them there when it has
    been freed, filled holes included: the heap grew by the minute.
    """
    lines: list[bytes] = []  # bytes: paths of files may be anything
    with suppress(OSError):
        lines = Path("/proc/self/maps").read_bytes().splitlines()
    for line in lines:
        if line.endswith(b"[heap]"):
            begin, end = (int(part, 16) for part in line.split(maxsplit=1)[0].split(b"-"))
            libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), _MADV_NOHUGEPAGE)


def _glibc() -> ctypes.CDLL | None:
    if not sys.platform.startswith("linux"):
        return None
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallinfo2"):
        return None
    libc.mallinfo2.restype = _HeapInfo
    libc.malloc.restype = libc.sbrk.restype = ctypes.c_void_p
    libc.sbrk.argtypes = [ctypes.c_ssize_t]
    libc.malloc.argtypes = (ctypes.c_size_t,)
    return libc
