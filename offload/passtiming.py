"""Timing of passes in INFERENCE (``offload_timing``): copies, computing and waiting, by label."""

from __future__ import annotations

import io
import logging
import statistics
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from modelopt_lite.offload.timeline import Op, PassRecord, Timeline

log = logging.getLogger("modelopt_lite.offload")

KEPT_PASSES = 1024
TOLD_PASSES = 10  # the table is logged after so many


@dataclass(frozen=True, slots=True)
class OffloadTimingSnapshot:
    """One pass: milliseconds by label.

    Attributes:
        number: Of the pass, from 0.
        transfer_ms: Copies that were queued in this pass, whenever their label computes.
        compute_ms: From when a label's weights were there to the end of its forward.
        wait_ms: How long computing stood still until they were there.
    """

    number: int
    transfer_ms: Mapping[str, float]
    compute_ms: Mapping[str, float]
    wait_ms: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class TimingStatistics:
    """Over passes, in milliseconds; ``std`` is of the passes themselves, not an estimate."""

    count: int
    min: float
    max: float
    avg: float
    median: float
    std: float

    @classmethod
    def of(cls, times: Iterable[float]) -> TimingStatistics:
        """Summarize times, of which there is at least one."""
        ms = list(times)
        mean, middle = statistics.fmean(ms), statistics.median(ms)
        return cls(len(ms), min(ms), max(ms), mean, middle, statistics.pstdev(ms))


@dataclass(frozen=True, slots=True)
class OffloadTimingReport:
    """What was timed: by label, in the order of a pass; a label that never copies has no transfer.

    Attributes:
        passes: How many.
        transfer: See `OffloadTimingSnapshot`.
        compute: See there.
        wait: See there.
    """

    passes: int
    transfer: Mapping[str, TimingStatistics]
    compute: Mapping[str, TimingStatistics]
    wait: Mapping[str, TimingStatistics]

    def compute_budgets_by_profile_label(
        self, labels: Iterable[str], conservative: bool = False
    ) -> dict[str, float]:
        """Return how long each label computes, which is the time that copies can hide in.

        Args:
            labels: Those that were not timed are left out.
            conservative: The shortest time in place of the median.
        """
        known = {label: self.compute[label] for label in labels if label in self.compute}
        return {label: s.min if conservative else s.median for label, s in known.items()}


class OffloadTiming:
    """Keeps the last passes of a timeline as numbers."""

    def __init__(self, timeline: Timeline, *, keep: int = KEPT_PASSES) -> None:
        self._timeline = timeline
        self._kept: deque[OffloadTimingSnapshot] = deque(maxlen=keep)
        self._last = self._generation = -1
        self._untold = 0

    @property
    def snapshots(self) -> tuple[OffloadTimingSnapshot, ...]:
        """The passes, the oldest first."""
        return tuple(self._kept)

    def reset(self) -> None:
        """Forget the passes; one that is under way still counts when it is done."""
        self._kept.clear()
        self._untold = 0

    def read(self, replay_generation: int = -1, *, tell: bool = False) -> bool:
        """Read the passes that the device has done since; see `update_offload_timing`.

        Args:
            replay_generation: See there.
            tell: Log a table after every ten passes.
        """
        if replay_generation >= 0 and replay_generation == self._generation:
            return False
        self._generation = replay_generation
        done = self._timeline.done_since(self._last)
        for record in done:
            self._kept.append(_snapshot(record))
            self._last = record.number
        self._untold += len(done)
        if tell and self._untold >= TOLD_PASSES and (report := self.report()) is not None:
            self._untold = 0
            log.info("%s", format_offload_timing_table(report))
        return bool(done)

    def report(self) -> OffloadTimingReport | None:
        """Summarize the passes that are kept; None where there are none."""
        if not self._kept:
            return None
        return OffloadTimingReport(
            len(self._kept),
            _summary(kept.transfer_ms for kept in self._kept),
            _summary(kept.compute_ms for kept in self._kept),
            _summary(kept.wait_ms for kept in self._kept),
        )


def format_offload_timing_table(report: OffloadTimingReport) -> str:
    """Return a report as a table: median (min, max) milliseconds of each label."""
    table = Table("unit", box=SIMPLE, pad_edge=False, title=f"{report.passes} passes, ms")
    for what in ("copy", "compute", "wait"):
        table.add_column(f"{what}: median (min, max, std)", justify="right")
    for label in dict.fromkeys((*report.compute, *report.transfer)):
        cells = [part.get(label) for part in (report.transfer, report.compute, report.wait)]
        table.add_row(label, *(_cell(cell) for cell in cells))
    console = Console(file=io.StringIO(), width=140, color_system=None)
    with console.capture() as captured:
        console.print(table)
    return captured.get()


def _cell(found: TimingStatistics | None) -> str:
    if found is None:
        return "-"
    return f"{found.median:.3f} ({found.min:.3f}, {found.max:.3f}, {found.std:.3f})"


def _snapshot(record: PassRecord) -> OffloadTimingSnapshot:
    return OffloadTimingSnapshot(
        record.number,
        _by_label(record, "copy"),
        _by_label(record, "compute"),
        _by_label(record, "wait"),
    )


def _by_label(record: PassRecord, op: Op) -> dict[str, float]:
    """Add up spans of one kind: a label may run several times in a pass."""
    found: dict[str, float] = {}
    for span in record.spans:
        if span.op == op:
            found[span.label] = found.get(span.label, 0.0) + span.end - span.start
    return found


def _summary(passes: Iterable[Mapping[str, float]]) -> dict[str, TimingStatistics]:
    times: dict[str, list[float]] = {}
    for by_label in passes:
        for label, ms in by_label.items():
            times.setdefault(label, []).append(ms)
    return {label: TimingStatistics.of(ms) for label, ms in times.items()}
