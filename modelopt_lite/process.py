"""What is set for the whole process, so that it spends no time on what stays anyway."""

from __future__ import annotations

import atexit
import functools
import gc
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_paused(*, stays: bool = False) -> Iterator[None]:
    """Collect nothing meanwhile: for work whose objects all stay.

    torch, transformers and a plan are a million objects, and a full collection looks at each of
    them: 0.3 seconds, again and again, and a quarter of the time of a plan for 1e12 parameters.
    What is there at the end counts as old, or the next collection would begin with all of it.

    Args:
        stays: Later collections leave out what is there at the end, while `only_new_collected`
            lasts.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if stays:
            gc.freeze()
        elif not gc.get_freeze_count():  # what somebody has frozen would thaw with it
            gc.freeze()
            gc.unfreeze()
        if was_on:
            gc.enable()


@contextmanager
def only_new_collected() -> Iterator[None]:
    """Leave out of collections what is there when this begins, until it ends."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@functools.cache
def exit_at_once() -> None:
    """Spare the collections at the end of the process, whose memory the system takes back.

    They cost half a second. What is in a cycle then is not finalized, which Python never promises;
    functions registered with ``atexit`` and ``weakref.finalize`` are called as ever.
    """
    atexit.register(gc.freeze)


def usable_cores() -> int:
    """Return how many cores the process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def use_huge_pages() -> None:
    """Have torch ask for huge pages where a tensor has room for one.

    The system clears each page that it gives: an activation of megabytes costs as much time by
    small pages as the work on it does. torch reads its variable when it first allocates, so this
    must come before; a value that the user set stays.
    """
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")


def threads_beside() -> int:
    """Return how many of torch's threads quantizing takes beside other work: half of them."""
    import torch

    return max(1, torch.get_num_threads() // 2)


def compute_on(threads: int) -> None:
    """Have torch run what the calling thread computes on so many threads, its own among them.

    Each thread that computes has a team of torch's threads. Where teams have more threads together
    than the processor has cores, they wait for each other asleep, at each operation: on two cores
    a run took half as long again with two teams of two.
    """
    import torch

    usual = torch.get_num_threads()
    torch.set_num_threads(threads)
    # That is also what threads yet to begin would have; set again by a thread that ends with it.
    again = threading.Thread(target=torch.set_num_threads, args=(usual,))
    again.start()
    again.join()
