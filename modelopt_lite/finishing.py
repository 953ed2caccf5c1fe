"""Finish a unit on a thread of its own while the passes run through the next one."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType

import torch

from modelopt_lite.process import compute_on

Task = Callable[[], None]


class OneBehind:
    """Does tasks in order, one at a time, while the caller prepares the next.

    Whoever hands over a task waits for the one before it: what two tasks hold is in memory at a
    time, that of the caller and that of the thread.

    Leaving the ``with`` block waits for the task in hand. Where the block ended by an error, and
    the task had failed before, the task's error is the one to see: it is the first.

    Args:
        overlapped: False does each task at once, on the caller's thread.
        threads: How many of torch's threads the tasks take where they overlap; None: the usual.
    """

    def __init__(self, *, overlapped: bool = True, threads: int | None = None) -> None:
        given = () if threads is None else (compute_on, (threads,))
        self._pool = ThreadPoolExecutor(1, "quantizer", *given) if overlapped else None
        self._doing: Future[None] | None = None

    def __enter__(self) -> OneBehind:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if error is None or isinstance(error, Exception):
                self.wait()
        finally:
            if self._pool is not None:
                self._pool.shutdown()

    def start(self, task: Task) -> None:
        """Have a task done, once the one before it is.

        Raises:
            BaseException: What the one before raised.
        """
        self.wait()
        if self._pool is None:
            task()
        else:
            self._doing = self._pool.submit(_without_gradients, task)

    def wait(self) -> None:
        """Wait for the task in hand.

        Raises:
            BaseException: What it raised.
        """
        doing, self._doing = self._doing, None
        if doing is not None:
            doing.result()


def _without_gradients(task: Task) -> None:
    with torch.inference_mode():  # belongs to the thread
        task()
