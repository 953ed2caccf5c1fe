"""Tell a person, or a program, how far a run is."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Progress = Callable[[str, int, int], None]
log = logging.getLogger("modelopt_lite")


@contextmanager
def make_progress(progress: bool | Progress) -> Iterator[Progress]:
    """Give a function ``(phase, done, total)``.

    Args:
        progress: A function is used as it is. True: a bar on a terminal, and a log line at most
            every ten seconds elsewhere. False: nothing.
    """
    if callable(progress):
        yield progress
    elif not progress:
        yield lambda phase, done, total: None
    elif sys.stderr.isatty():
        with _bar() as report:
            yield report
    else:
        yield _log_lines()


@contextmanager
def _bar() -> Iterator[Progress]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=None)

        def report(phase: str, done: int, total: int) -> None:
            bar.update(task, description=phase, completed=done, total=total)

        yield report


def _log_lines(every: float = 10.0) -> Progress:
    last = time.monotonic()

    def report(phase: str, done: int, total: int) -> None:
        nonlocal last
        if (now := time.monotonic()) - last >= every or done == total:
            last = now
            log.info("%s (%d of %d)", phase, done, total)

    return report
