"""Write behind the computation, on a thread of its own."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, Protocol

import torch
from torch import Tensor

QUEUE_LIMIT = 16 << 20
Task = Callable[[], None]
Ticket = threading.Event


class TensorWriter(Protocol):
    """What tensors are written through: a `StreamingWriter` or an `ExportWriter`."""

    def claim(
        self, name: str, dtype: torch.dtype, shape: tuple[int, ...], *, again: bool = False
    ) -> Any:
        """Take the place of a tensor."""

    def fill(self, slot: Any, tensor: Tensor, /) -> None:
        """Write a tensor into its place."""

    def is_claimed(self, name: str) -> bool:
        """Whether the place is taken."""


class WriteBehind:
    """Takes tensors at once and writes them in order, while the caller goes on.

    Leaving the ``with`` block waits for everything that was taken, after an interruption, too;
    after an error it drops what has not been written.

    Args:
        writer: Where tensors go.
        limit: The most bytes that wait; whoever hands over more waits, too.

    Raises:
        OutputError: From any later call, where a write failed.
    """

    def __init__(self, writer: TensorWriter, limit: int = QUEUE_LIMIT) -> None:
        self._writer = writer
        self._limit = limit
        self._tasks: queue.SimpleQueue[tuple[Task, int] | None] = queue.SimpleQueue()
        self._waiting = 0
        self._error: BaseException | None = None
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._work, name="writer", daemon=True)

    def __enter__(self) -> WriteBehind:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if isinstance(error, Exception) and self._error is None:
            self._error = error
        self._tasks.put(None)
        self._thread.join()
        if error is None:
            self._raise()

    def is_taken(self, name: str) -> bool:
        """Whether a tensor of the layout was handed over."""
        return self._writer.is_claimed(name)

    def write(self, name: str, tensor: Tensor, *, again: bool = False) -> None:
        """Take a tensor; it must not change until it is written. See `StreamingWriter.write`."""
        slot = self._writer.claim(name, tensor.dtype, tuple(tensor.shape), again=again)
        self._put(lambda: self._writer.fill(slot, tensor), tensor.nbytes)

    def then(self, task: Task) -> Ticket:
        """Have a task done after everything that was handed over before it."""
        done = Ticket()

        def run() -> None:
            task()
            done.set()

        self._put(run, 0)
        return done

    def wait(self, ticket: Ticket) -> None:
        """Wait until a task is done."""
        while not ticket.wait(0.05):
            self._raise()

    def flush(self) -> None:
        """Wait until everything that was handed over is done."""
        self.wait(self.then(lambda: None))
        self._raise()

    def _put(self, task: Task, size: int) -> None:
        with self._changed:
            # A tensor above the limit goes alone.
            self._changed.wait_for(
                lambda: not self._waiting or self._waiting + size <= self._limit or self._error
            )
            self._raise()
            self._waiting += size
        self._tasks.put((task, size))

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def _work(self) -> None:
        with torch.inference_mode():
            while (item := self._tasks.get()) is not None:
                task, size = item
                item = None
                try:
                    if self._error is None:
                        task()
                except BaseException as error:  # raised where the next tensor is handed over
                    self._error = error
                del task
                with self._changed:
                    self._waiting -= size
                    self._changed.notify_all()
