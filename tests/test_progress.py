"""How far a run is: facts for people, calls for programs."""

from __future__ import annotations

import io
import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from torch import Tensor

from modelopt_lite import quantize_and_export
from modelopt_lite.progress import Meter, Outlook, Sample, make_progress, sample_process

GB = 10**9


def meter_of(outlook: Outlook, *samples: Sample) -> Meter:
    following: Iterator[Sample] = iter(samples)
    return Meter(outlook, lambda: next(following))


def test_facts_of_a_run() -> None:
    outlook = Outlook(
        tokens=8000,
        bytes_to_read=40 * GB,
        host_budget=3 * GB,
        device_budget=80 * GB,
        device_used=lambda: 20 * GB,
    )
    meter = meter_of(
        outlook, Sample(100.0, 5, 7, GB), Sample(110.0, 10 * GB + 5, 4 * GB + 7, 2 * GB)
    )
    meter.passed(2, 4)
    assert meter.line() == (
        "400 tokens/s, read 1.00 GB/s, write 0.40 GB/s, memory 2.0 of 3.0 GB, "
        "device 20.0 of 80.0 GB, 0:30 left"
    )


def test_speeds_are_those_of_the_last_seconds_and_the_time_left_that_of_the_whole_run() -> None:
    samples = [Sample(float(t), 0, 0, 0) for t in range(0, 31, 10)]
    meter = meter_of(Outlook(), *samples, Sample(40.0, 2 * GB, 0, 0))
    meter.passed(1, 100)
    for _ in samples[1:]:
        meter.line()
    assert meter.line() == "read 0.10 GB/s, write 0.00 GB/s, memory 0.0 GB, 1:06:00 left"


def test_nothing_is_said_of_what_is_not_known() -> None:
    meter = meter_of(Outlook(tokens=5, bytes_to_read=9), Sample(1.0, 0, 0, 0), Sample(1.0, 0, 0, 0))
    assert meter.line() == "memory 0.0 GB"


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="the system does not tell")
def test_reading_and_writing_of_the_process_are_counted(tmp_path: Path) -> None:
    before = sample_process()
    (tmp_path / "file").write_bytes(bytes(300_000))
    assert len((tmp_path / "file").read_bytes()) == 300_000
    after = sample_process()
    assert after.written - before.written >= 300_000
    assert after.read - before.read >= 300_000
    assert after.resident > 10**6


def test_log_lines_where_there_is_no_terminal(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "modelopt_lite"), make_progress(True) as tell:
        tell("unit a", 1, 2)
        tell("unit b", 2, 2)
    (message,) = caplog.messages  # the first came less than ten seconds after the start
    assert message.startswith("unit b (2 of 2): ")
    assert "memory" in message


def test_lines_are_seen_in_a_program_that_set_up_no_log(monkeypatch: pytest.MonkeyPatch) -> None:
    stderr, root = io.StringIO(), logging.getLogger()
    monkeypatch.setattr(sys, "stderr", stderr)
    monkeypatch.setattr(root, "handlers", [])
    before = logging.getLogger("modelopt_lite").level
    with make_progress(True) as tell:
        tell("unit b", 2, 2)
    assert "unit b (2 of 2)" in stderr.getvalue()
    assert logging.getLogger("modelopt_lite").handlers == []
    assert logging.getLogger("modelopt_lite").level == before


def test_a_display_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    stderr = Terminal()
    monkeypatch.setattr(sys, "stderr", stderr)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    with make_progress(True, Outlook(host_budget=3 * GB)) as tell:
        tell("unit model.layers.3", 3, 12)
    shown = stderr.getvalue()
    assert "unit model.layers.3" in shown
    assert "3/12" in shown
    assert "of 3.0 GB" in shown


def test_a_program_is_told_of_every_unit(
    checkpoint: Callable[..., Path], token_batches: list[Tensor], tmp_path: Path
) -> None:
    told: list[tuple[str, int, int]] = []
    quantize_and_export(
        checkpoint("llama"),
        export_dir=tmp_path / "out",
        calib_data=token_batches,
        progress=lambda *event: told.append(event),
    )
    units = ["model.embed_tokens", "model.layers.0", "model.layers.1", "model.norm"]
    assert told == [(f"unit {name}", i, len(units)) for i, name in enumerate(units, start=1)]
