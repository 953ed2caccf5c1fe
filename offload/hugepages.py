"""Host memory that disks fill fast: whole pages, huge ones where the system gives them."""

from __future__ import annotations

import ctypes
import mmap
from contextlib import suppress

import torch
from torch import Tensor

_HUGE = 2 << 20  # bytes of a huge page on x86-64, and on arm64 with pages of 4 KiB
_ADVICE = getattr(mmap, "MADV_HUGEPAGE", None)


def whole_pages(nbytes: int) -> Tensor:
    """Allocate uint8 [nbytes] of host memory that begins at a page, undefined contents.

    A disk that reads to huge pages past the page cache gets requests of megabytes: a request has a
    limited number of parts, each of them contiguous in memory.
    """
    page = _HUGE if nbytes >= _HUGE else mmap.PAGESIZE
    with torch.inference_mode(False):
        room = torch.empty(nbytes + page - 1, dtype=torch.uint8, device="cpu")
        buffer = room[-room.data_ptr() % page :][:nbytes]
    if page == _HUGE and _ADVICE is not None:
        with suppress(OSError, AttributeError):  # where there is no libc to ask, there is no advice
            whole = ctypes.c_size_t(nbytes // _HUGE * _HUGE)
            ctypes.CDLL(None).madvise(ctypes.c_void_p(buffer.data_ptr()), whole, _ADVICE)
    return buffer
