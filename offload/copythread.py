"""One thread that does copies in the order in which they were asked for, and what went wrong there.

An exception on the thread ends no one's work by itself: it is kept, and raised with its own
traceback where somebody waits for that copy.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType

from modelopt_lite.errors import ModelOptLiteError


class DeviceError(ModelOptLiteError):
    """A device, stream or event was used in a way that could give wrong data."""

    code = "MOL340"


@dataclass(slots=True, eq=False)
class Failure:
    """An exception of an asynchronous job, and whether anybody has seen it."""

    position: int
    error: BaseException
    trace: TracebackType | None

    def throw(self) -> None:
        """Raise the exception; its traceback starts where it was first raised."""
        raise self.error.with_traceback(self.trace)


@dataclass(slots=True, eq=False)
class Mark:
    """A point in a queue: everything up to ``position`` comes before it."""

    position: int
    failure: Failure | None = None


class FailureLog:
    """Failures of jobs that run in order, on one or several streams.

    A stream's jobs form batches, each ended by marks. A mark raises the first failure of its batch
    each time it is asked; and any earlier failure that nobody has seen yet, once. So no failure is
    lost, and one that was seen does not spoil what comes after it.
    """

    def __init__(self) -> None:
        self._batches: dict[int, Failure] = {}
        self._sealed: set[int] = set()
        self._unseen: list[Failure] = []

    def begin(self, stream: int) -> None:
        """Say that a job runs: the first one after a mark begins a batch."""
        if stream in self._sealed:
            self._sealed.discard(stream)
            self._batches.pop(stream, None)

    def add(self, stream: int, position: int, error: BaseException) -> None:
        """Keep an exception that is being handled; the caller's own frame leaves the traceback."""
        trace = error.__traceback__.tb_next if error.__traceback__ else None
        failure = Failure(position, error, trace)
        self._batches.setdefault(stream, failure)
        self._unseen.append(failure)

    def seal(self, stream: int) -> Failure | None:
        """Return the first failure of the stream's batch, which ends."""
        self._sealed.add(stream)
        return self._batches.get(stream)

    def raise_for(self, mark: Mark) -> None:
        """Raise what a wait for ``mark`` must not hide."""
        failure = mark.failure or next(
            (each for each in self._unseen if each.position <= mark.position), None
        )
        if failure is not None:
            if failure in self._unseen:
                self._unseen.remove(failure)
            failure.throw()

    def clear(self) -> None:
        """Forget everything: what is kept holds the frames, so the tensors, of failed jobs."""
        self._batches.clear()
        self._sealed.clear()
        self._unseen.clear()


@dataclass(slots=True)
class _Job:
    position: int
    stream: int
    work: Callable[[], None]
    seals: bool


class CopyThread:
    """A queue of jobs and the one thread that runs them. The thread starts with the first job.

    Safe to use from several threads.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: deque[_Job] = deque()
        self._change = threading.Condition()
        self._submitted = 0
        self._done = 0
        self._closed = False
        self._thread: threading.Thread | None = None
        self._failures = FailureLog()

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    def submit(self, stream: int, work: Callable[[], None], *, seals: bool = False) -> int:
        """Queue a job and return its position.

        Args:
            stream: Which stream's batch a failure belongs to.
            work: What to do.
            seals: It does no copy, but stands for a mark.

        Raises:
            DeviceError: The thread was closed.
        """
        with self._change:
            self._check_open()
            self._submitted += 1
            self._jobs.append(_Job(self._submitted, stream, work, seals))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
            self._change.notify_all()
            return self._submitted

    def mark(self, stream: int, mark: Mark, work: Callable[[], None] = lambda: None) -> None:
        """Queue a job that closes a batch of ``stream``, and let ``mark`` stand for it."""

        def seal() -> None:
            mark.failure = self._failures.seal(stream)
            work()

        with self._change:
            mark.position = self._submitted + 1
            self.submit(stream, seal, seals=True)

    def reached(self, mark: Mark) -> bool:
        """Whether everything up to the mark has been done, well or badly."""
        return self._done >= mark.position

    def wait(self, mark: Mark) -> None:
        """Block until everything up to the mark is done; raise what failed there.

        Raises:
            DeviceError: The thread was closed before it got that far.
        """
        with self._change:
            self._change.wait_for(lambda: self._closed or self._done >= mark.position)
            if self._done < mark.position:
                self._check_open()
            self._failures.raise_for(mark)

    def drain(self) -> None:
        """Block until every job is done; raise the first failure that nobody has seen."""
        self.wait(Mark(self._submitted))

    def close(self) -> None:
        """End the thread after the job that it is at; jobs that still wait are dropped."""
        with self._change:
            self._closed = True
            self._jobs.clear()
            self._change.notify_all()
        # A finalizer may run on any thread, this one included.
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        self._failures.clear()

    def _check_open(self) -> None:
        if self._closed:
            raise DeviceError(f"{self._name}: closed; copies can no longer be made or waited for")

    def _run(self) -> None:
        while True:
            with self._change:
                self._change.wait_for(lambda: self._closed or bool(self._jobs))
                if self._closed:
                    return
                job = self._jobs.popleft()
                if not job.seals:
                    self._failures.begin(job.stream)
            failed: BaseException | None = None
            try:
                job.work()
            except BaseException as error:  # the thread must outlive a source that raises
                failed = error
            with self._change:
                if failed is not None:
                    self._failures.add(job.stream, job.position, failed)
                self._done = job.position
                self._change.notify_all()
            del job, failed  # an idle thread must not keep the last slot and source alive
