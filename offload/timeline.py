"""What a pass did and when: copies, computing and waiting, as a trace that Perfetto opens."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from torch.profiler import record_function

from modelopt_lite.offload.device import Device, Event, Stream

Op = Literal["copy", "compute", "wait"]
_PROCESS = 1


class Span(NamedTuple):
    """One operation.

    Attributes:
        op: What was done.
        stream: Where: "compute", or the name of a copy stream.
        label: Whose weights.
        slot: The block that holds them; -1: none.
        bytes: How many were copied; 0 for other operations.
        start: Milliseconds from the beginning of its pass.
        end: Likewise.
    """

    op: Op
    stream: str
    label: str
    slot: int
    bytes: int
    start: float
    end: float


class PassRecord(NamedTuple):
    """The operations of one pass, in the order in which they were begun.

    Attributes:
        number: Passes count from 0.
        offset: Milliseconds from the beginning of the first pass.
        spans: See `Span`.
    """

    number: int
    offset: float
    spans: tuple[Span, ...]

    def time(self, op: Op) -> float:
        """Return the milliseconds that all operations of one kind took."""
        return sum(span.end - span.start for span in self.spans if span.op == op)


@dataclass(slots=True)
class _OpenSpan:
    """A span whose times are still with the device."""

    op: Op
    stream: str
    label: str
    slot: int
    nbytes: int
    start: Event
    end: Event | None = None
    times: tuple[float, float] | None = None


@dataclass(slots=True)
class _OpenPass:
    number: int
    base: Event
    offset: float | None = None
    spans: list[_OpenSpan] = field(default_factory=list)


class Timeline:
    """Records passes with a device's timing events, so that it never waits during one.

    Args:
        device: Whose streams are recorded.
        keep: How many passes to keep; older ones are dropped.
        ranges: Whether each span is a range of torch's profiler too, ``offload.copy layers.3``, in
            all phases (`torch.autograd.profiler.emit_nvtx` makes NVTX ranges of them).
    """

    def __init__(self, device: Device, *, keep: int = 16, ranges: bool = False) -> None:
        self._device = device
        self._ranges = ranges
        self._current: _OpenPass | None = None
        self._closed: deque[_OpenPass] = deque(maxlen=keep)
        self._count = 0
        self._last: tuple[Event, float] | None = None  # the pass placed last: its base and offset

    @property
    def in_pass(self) -> bool:
        """Whether a pass is open."""
        return self._current is not None

    def begin_pass(self) -> None:
        """Begin a pass; one that was left open, as by an exception, is closed first."""
        self.end_pass()
        base = self._now(None)
        if self._last is None:
            self._last = base, 0.0
        self._current = _OpenPass(self._count, base)
        self._count += 1

    def end_pass(self) -> None:
        """Close the pass, if one is open. Spans that were not ended are left out."""
        if self._current is not None:
            self._closed.append(self._current)
            self._current = None

    @contextmanager
    def span(
        self, op: Op, label: str, stream: Stream | None = None, *, slot: int = -1, nbytes: int = 0
    ) -> Iterator[None]:
        """Record what is queued on a stream inside the block; outside of a pass only a range."""
        current = self._current
        with record_function(f"offload.{op} {label}") if self._ranges else nullcontext():
            if current is None:
                yield
                return
            name = "compute" if stream is None else stream.name
            span = _OpenSpan(op, name, label, slot, nbytes, self._now(stream))
            current.spans.append(span)
            yield
            span.end = self._now(stream)

    @contextmanager
    def around(self, trap: AbstractContextManager[object], label: str) -> Iterator[None]:
        """Record how long a trap waits for its weights, and what is computed inside of it."""
        with ExitStack() as stack:
            with self.span("wait", label):
                stack.enter_context(trap)
            with self.span("compute", label):
                yield

    def passes(self) -> list[PassRecord]:
        """Return the closed passes that are kept, as far as the device has got.

        It neither waits nor raises a copy's failure, which is for the one who needs the copy: what
        is not done yet is left out, and there at a later call.
        """
        return [self._resolve(record) for record in self._closed if self._place(record)]

    def done_since(self, number: int) -> list[PassRecord]:
        """Return the kept passes after the one of a number, up to the first not wholly done."""
        found = []
        for record in self._closed:
            if record.number <= number:
                continue
            if not self._place(record):
                break
            resolved = self._resolve(record)
            if len(resolved.spans) < sum(span.end is not None for span in record.spans):
                break
            found.append(resolved)
        return found

    def chrome_trace(self) -> dict[str, Any]:
        """Return the kept passes in Chrome's trace event format."""
        return chrome_trace(self.passes(), process=self._device.name)

    def write(self, path: Path) -> None:
        """Write the trace as JSON; https://ui.perfetto.dev opens it."""
        path.write_text(json.dumps(self.chrome_trace()))

    def _now(self, stream: Stream | None) -> Event:
        event = self._device.event(timing=True)
        self._device.record(event, stream)
        return event

    def _place(self, record: _OpenPass) -> bool:
        """Find when a pass began, from the pass before: whether that is known yet.

        From pass to pass, since an accelerator gives times in float32, good over short spans only.
        """
        if record.offset is None and self._last and self._device.query(record.base):
            base, offset = self._last
            record.offset = offset + self._device.elapsed(base, record.base)
            self._last = record.base, record.offset
        return record.offset is not None

    def _resolve(self, record: _OpenPass) -> PassRecord:
        for span in record.spans:
            if span.times is None and span.end is not None and self._device.query(span.end):
                start = self._device.elapsed(record.base, span.start)
                span.times = start, self._device.elapsed(record.base, span.end)
        spans = tuple(
            Span(span.op, span.stream, span.label, span.slot, span.nbytes, *span.times)
            for span in record.spans
            if span.times is not None
        )
        return PassRecord(record.number, record.offset or 0.0, spans)


def chrome_trace(passes: Iterable[PassRecord], *, process: str = "offload") -> dict[str, Any]:
    """Return passes in Chrome's trace event format: a track per stream, complete ("X") events.

    Times are microseconds. An arrow leads from each copy to the computing that it was for.
    Source: "Trace Event Format", Google, part of Chromium's Catapult project.
    """
    tracks: dict[str, int] = {"compute": 1}
    events: list[dict[str, Any]] = []
    arrows = 0
    arriving: dict[str, tuple[float, int]] = {}
    for record in passes:
        for span in sorted(record.spans, key=lambda span: (span.start, span.end)):
            track = tracks.setdefault(span.stream, len(tracks) + 1)
            where = {"pid": _PROCESS, "tid": track}
            start, end = ((record.offset + time) * 1e3 for time in (span.start, span.end))
            events.append(
                {
                    "name": span.label or span.op,
                    "cat": span.op,
                    "ph": "X",
                    "ts": start,
                    "dur": end - start,
                    **where,
                    "args": {"pass": record.number, "slot": span.slot, "bytes": span.bytes},
                }
            )
            if span.op == "copy":
                arriving[span.label] = ((start + end) / 2, track)
            elif span.op == "compute" and span.label in arriving:
                moment, source = arriving.pop(span.label)
                arrow = {"name": "weights", "cat": "flow", "id": arrows, "pid": _PROCESS}
                arrows += 1
                events.append({**arrow, "ph": "s", "tid": source, "ts": moment})
                events.append({**arrow, "ph": "f", "bp": "e", "tid": track, "ts": start})
    names = [{"name": "process_name", "ph": "M", "pid": _PROCESS, "args": {"name": process}}]
    for stream, track in tracks.items():
        thread = {"name": "thread_name", "ph": "M", "pid": _PROCESS, "tid": track}
        names.append({**thread, "args": {"name": stream}})
    return {"traceEvents": [*names, *events], "displayTimeUnit": "ms"}
