"""The timeline: what each pass did and when, and the trace that Perfetto opens."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from modelopt_lite.offload.device import Device, Event, HostDevice
from modelopt_lite.offload.simdevice import SimDevice
from modelopt_lite.offload.timeline import PassRecord, Span, Timeline, chrome_trace


def sim() -> SimDevice:
    return SimDevice(1000, curve=lambda nbytes: nbytes / 8)


def run(device: Device, timeline: Timeline, *, passes: int = 2) -> None:
    """Bring in and use two units, one after the other, per pass."""
    stream, buffer, ready = device.stream(), device.allocate(16), device.event()
    used = device.event()
    device.record(used)
    for _ in range(passes):
        timeline.begin_pass()
        for label in ("a", "b"):
            device.wait(used, stream)
            with timeline.span("copy", label, stream, slot=0, nbytes=16):
                device.copy(buffer, torch.zeros(4), stream, label=label)
            device.record(ready, stream)
            with timeline.span("wait", label):
                device.wait(ready)
            with timeline.span("compute", label):
                if isinstance(device, SimDevice):
                    device.compute(label, 3.0)
            device.record(used)
        timeline.end_pass()
    device.synchronize()


def test_spans_of_virtual_passes() -> None:
    device = sim()
    timeline = Timeline(device)
    run(device, timeline)
    first, second = timeline.passes()
    assert first.spans == (
        Span("copy", "copy", "a", 0, 16, 0.0, 2.0),
        Span("wait", "compute", "a", -1, 0, 0.0, 2.0),
        Span("compute", "compute", "a", -1, 0, 2.0, 5.0),
        Span("copy", "copy", "b", 0, 16, 5.0, 7.0),
        Span("wait", "compute", "b", -1, 0, 5.0, 7.0),
        Span("compute", "compute", "b", -1, 0, 7.0, 10.0),
    )
    assert second.spans == first.spans
    assert (first.number, first.offset, second.number, second.offset) == (0, 0.0, 1, 10.0)
    assert (first.time("copy"), first.time("wait"), first.time("compute")) == (4.0, 4.0, 6.0)


def test_the_device_agrees_with_the_timeline() -> None:
    device = sim()
    timeline = Timeline(device)
    run(device, timeline, passes=1)
    (record,) = timeline.passes()
    key = [(span.op, span.label, span.start, span.end) for span in record.spans]
    assert sorted(key) == sorted((s.op, s.label, s.start, s.end) for s in device.trace)


def test_real_passes_are_in_order() -> None:
    device = HostDevice()
    timeline = Timeline(device)
    run(device, timeline, passes=3)
    device.close()
    records = timeline.passes()
    assert [record.number for record in records] == [0, 1, 2]
    assert 0 == records[0].offset < records[1].offset < records[2].offset
    for record in records:
        assert len(record.spans) == 6
        assert all(0 <= span.start <= span.end for span in record.spans)


def test_old_passes_are_dropped_and_times_stay_right() -> None:
    device = sim()
    timeline = Timeline(device, keep=2)
    run(device, timeline, passes=3)
    timeline.passes()
    run(device, timeline, passes=4)
    assert [(each.number, each.offset) for each in timeline.passes()] == [(5, 50.0), (6, 60.0)]


def test_no_time_is_measured_over_more_than_a_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    device = sim()
    timeline, elapsed = Timeline(device), device.elapsed

    def short(start: Event, end: Event) -> float:
        assert elapsed(start, end) <= 10.0  # of longer ones float32 loses the microseconds
        return elapsed(start, end)

    monkeypatch.setattr(device, "elapsed", short)
    run(device, timeline, passes=4)
    assert [record.offset for record in timeline.passes()] == [0.0, 10.0, 20.0, 30.0]


def test_nothing_is_recorded_outside_of_a_pass() -> None:
    device = sim()
    timeline = Timeline(device)
    with timeline.span("compute", "a"):
        device.compute("a", 1.0)
    timeline.end_pass()
    assert timeline.passes() == []
    assert chrome_trace([])["traceEvents"]


def test_a_pass_left_open_is_closed_by_the_next() -> None:
    device = sim()
    timeline = Timeline(device)
    timeline.begin_pass()
    with pytest.raises(ValueError):
        with timeline.span("compute", "a"):
            raise ValueError
    with timeline.span("compute", "b"):
        device.compute("b", 1.0)
    timeline.begin_pass()
    device.synchronize()
    assert [[span.label for span in each.spans] for each in timeline.passes()] == [["b"]]


def test_what_is_not_done_comes_later_and_a_failure_is_not_taken() -> None:
    class Broken:
        def read_into(self, dst: Tensor, /) -> None:
            raise OSError("disk gone")

    device = sim()
    timeline, stream, event = Timeline(device), device.stream(), device.event()
    timeline.begin_pass()
    with timeline.span("copy", "a", stream):
        device.copy(device.allocate(8), Broken(), stream)
    device.record(event, stream)
    timeline.end_pass()
    assert timeline.passes()[0].spans == ()
    while not device.query(event):
        pass
    assert len(timeline.passes()[0].spans) == 1
    with pytest.raises(OSError, match="disk gone"):
        device.wait(event)


# --- the trace


@pytest.mark.parametrize("make", [sim, HostDevice])
def test_the_trace_is_valid(make: Callable[[], Device], tmp_path: Path) -> None:
    device = make()
    timeline = Timeline(device)
    run(device, timeline)
    timeline.write(tmp_path / "trace.json")
    trace = json.loads((tmp_path / "trace.json").read_text())
    device.close()
    assert trace["displayTimeUnit"] == "ms"
    events = trace["traceEvents"]
    named = {each["tid"]: each["args"]["name"] for each in events if each["name"] == "thread_name"}
    assert named == {1: "compute", 2: "copy"}
    assert events[0]["args"] == {"name": device.name}
    slices = [each for each in events if each["ph"] == "X"]
    assert len(slices) == 12
    for each in slices:
        assert each["dur"] >= 0
        assert each["tid"] in named
        assert each["pid"] == events[0]["pid"]
    for tid in named:  # slices of a track do not overlap: Perfetto would nest them
        track = sorted((e["ts"], e["ts"] + e["dur"]) for e in slices if e["tid"] == tid)
        assert all(a[1] <= b[0] + 1e-6 for a, b in pairwise(track))
    check_arrows(events, slices)


def check_arrows(events: list[dict[str, Any]], slices: list[dict[str, Any]]) -> None:
    """Each arrow goes from inside a copy to the beginning of the computing with its weights."""

    def at(arrow: dict[str, Any], op: str) -> str:
        (found,) = {
            each["name"]
            for each in slices
            if each["cat"] == op
            and each["tid"] == arrow["tid"]
            and each["ts"] <= arrow["ts"] <= each["ts"] + each["dur"]
        }
        return str(found)

    starts = {each["id"]: each for each in events if each["ph"] == "s"}
    ends = {each["id"]: each for each in events if each["ph"] == "f"}
    assert starts.keys() == ends.keys()
    assert len(starts) == 4
    for key, start in starts.items():
        assert at(start, "copy") == at(ends[key], "compute")
        assert start["ts"] <= ends[key]["ts"]


def test_times_are_microseconds_from_the_first_pass() -> None:
    span = Span("copy", "bus", "", 3, 7, 1.0, 2.5)
    trace = chrome_trace([PassRecord(4, 10.0, (span,))], process="predicted")
    (event,) = [each for each in trace["traceEvents"] if each["ph"] == "X"]
    assert (event["ts"], event["dur"], event["name"]) == (11_000.0, 1_500.0, "copy")
    assert event["args"] == {"pass": 4, "slot": 3, "bytes": 7}
