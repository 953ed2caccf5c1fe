"""Tell a person, or a program, how far a run is."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

Progress = Callable[[str, int, int], None]
log = logging.getLogger("modelopt_lite")

_WINDOW = 20.0  # seconds over which the speed of the disk is averaged
_LOG_EVERY = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """What is known of a run when it begins.

    Attributes:
        tokens: Tokens that pass through the model.
        bytes_to_read: Bytes of the source, by which the time left is estimated; 0: unknown.
        host_budget: Bytes of host memory that the run may take, or is foretold to take.
        device_budget: The same on an accelerator.
        device_used: Tells how many bytes of an accelerator are in use; None where there is none.
    """

    tokens: int = 0
    bytes_to_read: int = 0
    host_budget: int = 0
    device_budget: int = 0
    device_used: Callable[[], int] | None = None


class Sample(NamedTuple):
    """What this process has done until a moment, in seconds and bytes."""

    time: float
    read: int
    written: int
    resident: int


class Meter:
    """Turns what a process has done into a line of facts for people.

    Args:
        outlook: What is known of the run.
        sample: Tells what the process has done.
    """

    def __init__(self, outlook: Outlook, sample: Callable[[], Sample] | None = None) -> None:
        self._outlook = outlook
        self._sample = sample or sample_process
        self._first = self._sample()
        self._recent = deque([self._first])
        self._share = 0.0

    def passed(self, done: int, total: int) -> None:
        """Take note that ``done`` of ``total`` units are finished."""
        self._share = done / total if total else 0.0

    def line(self) -> str:
        """Return speeds, memory by tier, and the time left, as far as they are known."""
        now = self._sample()
        while len(self._recent) > 1 and self._recent[0].time < now.time - _WINDOW:
            self._recent.popleft()
        before = self._recent[0]
        self._recent.append(now)
        outlook, facts = self._outlook, []
        elapsed, lately = now.time - self._first.time, now.time - before.time
        if outlook.tokens and self._share and elapsed > 0:
            facts.append(f"{outlook.tokens * self._share / elapsed:,.0f} tokens/s")
        if lately > 0:
            facts.append(f"read {(now.read - before.read) / lately / 1e9:.2f} GB/s")
            facts.append(f"write {(now.written - before.written) / lately / 1e9:.2f} GB/s")
        facts.append(_memory("memory", now.resident, outlook.host_budget))
        if outlook.device_used is not None:
            facts.append(_memory("device", outlook.device_used(), outlook.device_budget))
        # Bytes tell more than units, which differ in size; but reading runs ahead of the rest.
        share = self._share
        if outlook.bytes_to_read:
            share = min(share, (now.read - self._first.read) / outlook.bytes_to_read)
        if 0 < share < 1:
            facts.append(f"{_clock(elapsed * (1 - share) / share)} left")
        return ", ".join(facts)


def sample_process() -> Sample:
    """Return what this process has done; zeros where the system does not tell.

    Bytes are those that went through system calls, so that all reading and writing is counted,
    whoever does it.
    """
    counts = {"rchar": 0, "wchar": 0}
    resident = 0
    try:
        lines = Path("/proc/self/io").read_text(encoding="ascii").splitlines()
        counts |= {name: int(value) for name, _, value in (x.partition(":") for x in lines)}
        pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
        resident = int(pages) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        pass
    return Sample(time.monotonic(), counts["rchar"], counts["wchar"], resident)


@contextmanager
def make_progress(progress: bool | Progress, outlook: Outlook | None = None) -> Iterator[Progress]:
    """Give a function ``(phase, done, total)``.

    Args:
        progress: A function is used as it is. True: a display on a terminal, and a log line at
            most every ten seconds elsewhere. False: nothing.
        outlook: What is known of the run, for the facts beside its phase.
    """
    if callable(progress):
        yield progress
    elif not progress:
        yield lambda phase, done, total: None
    else:
        meter = Meter(outlook or Outlook())
        with _display(meter) if sys.stderr.isatty() else _log_lines(meter) as report:
            yield report


@contextmanager
def _display(meter: Meter) -> Iterator[Progress]:
    from rich.console import Console, Group
    from rich.live import Live
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
    from rich.progress import Progress as Bar
    from rich.text import Text

    bar = Bar(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    task = bar.add_task("", total=None)

    def report(phase: str, done: int, total: int) -> None:
        meter.passed(done, total)
        bar.update(task, description=phase, completed=done, total=total)

    with Live(
        get_renderable=lambda: Group(bar.get_renderable(), Text(meter.line())),
        console=Console(stderr=True),
        refresh_per_second=2,  # a unit may take minutes, its facts change meanwhile
        transient=True,
    ):
        yield report


@contextmanager
def _log_lines(meter: Meter, every: float = _LOG_EVERY) -> Iterator[Progress]:
    last = time.monotonic()

    def report(phase: str, done: int, total: int) -> None:
        nonlocal last
        meter.passed(done, total)
        if (now := time.monotonic()) - last >= every or done == total:
            last = now
            log.info("%s (%d of %d): %s", phase, done, total, meter.line())

    with _some_handler():
        yield report


@contextmanager
def _some_handler() -> Iterator[None]:
    """Show log lines on stderr where the program has not said what becomes of them."""
    if log.hasHandlers():
        yield
        return
    handler, level = logging.StreamHandler(), log.level
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(level)


def _memory(name: str, used: int, budget: int) -> str:
    allowed = f" of {budget / 1e9:.1f}" if budget else ""
    return f"{name} {used / 1e9:.1f}{allowed} GB"


def _clock(seconds: float) -> str:
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"
