"""Keep one message of HiGHS off standard output, where it prints whatever ``disp`` says."""

from __future__ import annotations

import ctypes
import os
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_NOISE = b"HighsMipSolverData::"
_lock = threading.Lock()


@contextmanager
def quiet_solver() -> Iterator[None]:
    """Drop the solver's lines from file descriptor 1 inside of the block.

    It is C code that prints, so the descriptor itself is redirected, to a file; whatever else was
    written there meanwhile, by any thread, is written out at the end. Where that cannot be done
    (no descriptor 1, no C library to flush) the lines stay.
    """
    with _lock:
        try:
            flush = ctypes.CDLL(None).fflush
            flush(None)
            saved = os.dup(1)
        except (OSError, TypeError, AttributeError):
            yield
            return
        with tempfile.TemporaryFile() as file:
            os.dup2(file.fileno(), 1)
            try:
                yield
            finally:
                flush(None)
                os.dup2(saved, 1)
                os.close(saved)
                file.seek(0)
                rest = b"".join(line for line in file if not line.startswith(_NOISE))
                while rest:
                    rest = rest[os.write(1, rest) :]
