"""What is told of an offloaded model: ranges for profilers, timings of passes, components."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import QUICK, Everything, Stack, assert_same, offloaded, tensors_of
from torch.profiler import ProfilerActivity, profile

import modelopt_lite.offload as flextensor
from modelopt_lite.errors import OffloadError
from modelopt_lite.offload import OffloadConfig, OffloadManager, OffloadTimingReport, api
from modelopt_lite.offload.passtiming import TOLD_PASSES, OffloadTiming, TimingStatistics
from modelopt_lite.offload.simdevice import SimDevice, gigabytes_per_second

IDS = torch.arange(10).view(2, 5)
LABELS = ["embed", "layers.0", "layers.1", "layers.2", "norm", "head"]


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch.manual_seed(0)
    with torch.no_grad():
        yield
    for manager in api._managers.values():
        manager.release()
    api._managers.clear()


def ranges(model: Stack) -> set[str]:
    """Names of the offload ranges of one pass."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        model(IDS)
    return {e.key for e in profiler.key_averages() if e.key.startswith("offload.")}


def test_ranges_in_all_phases(tmp_path: Path) -> None:
    model = Stack(3)
    units = {f"offload.{op} {label}" for op in ("wait", "compute") for label in LABELS}
    with offloaded(
        model,
        "host",
        load_strategy=Everything(2),
        enable_instrumentation=True,
        instrumentation_output_dir=str(tmp_path),
    ) as manager:
        seen = []
        for _ in range(3):
            seen.append((manager.phase.name, ranges(model)))
        assert seen == [("DISCOVERY", units), ("PROFILING", units), ("PROFILING", units)]
        model(IDS)
        assert ranges(model) == units | {f"offload.copy {label}" for label in LABELS}
    with offloaded(model, "host", load_strategy=Everything(2)):
        assert ranges(model) == set()


def test_components_are_written(tmp_path: Path) -> None:
    model = Stack(3)
    fields: dict[str, Any] = {**QUICK, "instrumentation_output_dir": str(tmp_path / "made")}
    config = OffloadConfig(**fields, enable_instrumentation=True)
    flextensor.offload(model, config)
    for _ in range(2):
        model(IDS)
    assert not (tmp_path / "made").exists()
    model(IDS)
    (file,) = (tmp_path / "made").glob("*/components.*_pid*.json")
    content = json.loads(file.read_text())
    components = {found["class_name"]: found for found in content["components"]}
    assert components["OffloadConfig"]["args"]["profiling_iters"] == 2
    assert components["OffloadManager"]["args"] == {"name": "default"}
    assert components["OffloadManager"]["module_path"] == "modelopt_lite.offload.manager"
    assert components["HostDevice"]["args"]["name"].startswith("host ")
    assert components["TensorManager"]["args"]["units"] == LABELS
    assert components["AdaptiveStrategy"]["args"]["n_blocks"] == 4
    assert "blocks_bytes" in components["BlockLoader"]["args"]
    assert content["host_memory"]["host_memory_total"] > 0
    assert content["host_memory"].keys() >= {"host_memory_free", "swap_total", "swap_used"}
    assert {row["label"]: row["samples"] for row in content["labels"]} == dict.fromkeys(LABELS, 2)
    assert all(row["median_ms"] > 0 for row in content["labels"])
    curve = tensors_of(flextensor.get_offload_manager()).transfer_curve()
    assert content["memory_transfer_stats"] == {str(size): ms for size, ms in curve.items()}


def test_components_by_hand_and_where_they_cannot_be_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(OffloadError, match="dump_instrumentation"):
        flextensor.dump_instrumentation(tmp_path)
    model = flextensor.offload(Stack(3), OffloadConfig(**QUICK, load_strategy=Everything()))
    written = flextensor.dump_instrumentation(tmp_path / "by hand")
    assert written is not None
    assert json.loads(written.read_text())["phase"] == "discovery"
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING):
        assert flextensor.dump_instrumentation(tmp_path / "file") is None
    assert "is not written" in caplog.text
    model(IDS)


def timed(device: SimDevice, label: str, forward: Any) -> Any:
    def run(*args: Any) -> Any:
        result = forward(*args)
        device.compute(label, 2.0)
        return result

    return run


def catch_up() -> None:
    """Wait for the copies that the last pass has queued, and read it."""
    flextensor.get_offload_manager().device.synchronize()
    flextensor.update_offload_timing()


def sim_manager(model: Stack, **fields: Any) -> tuple[OffloadManager, SimDevice]:
    """Copies of 1 byte take 1 us, a unit computes 2 ms."""
    device = SimDevice(1 << 22, curve=gigabytes_per_second(0.001))
    manager = OffloadManager("sim", device=device)
    for label in LABELS:
        model.get_submodule(label).forward = timed(
            device, label, model.get_submodule(label).forward
        )
    manager.offload(model, OffloadConfig(**QUICK, load_strategy=Everything(2), **fields))
    return manager, device


def test_passes_are_timed_on_the_devices_clock() -> None:
    model = Stack(3)
    expected = model(IDS)
    manager, _ = sim_manager(model, offload_timing="eager")
    assert manager.collect_offload_timing() is None
    for _ in range(3):
        model(IDS)
    assert manager.collect_offload_timing() is None
    for _ in range(6):
        assert_same(model(IDS), expected)
    manager.sync_prev_onload()
    manager.device.synchronize()
    manager.update_offload_timing()
    report = manager.collect_offload_timing()
    assert isinstance(report, OffloadTimingReport)
    assert report.passes == 6
    assert list(report.compute) == LABELS
    for label in LABELS:
        assert report.compute[label].median == pytest.approx(2.0)
    cargos = tensors_of(manager)._cargos
    for label in LABELS:
        # A label's copy is 1 us a byte; each takes longer than two computes, so computing waits.
        assert report.transfer[label].min == pytest.approx(cargos[label].nbytes / 1e3, rel=0.05)
    layer = report.wait["layers.1"]
    assert 0 < layer.min <= layer.median <= layer.max
    assert layer.count == 6
    budgets = report.compute_budgets_by_profile_label(["layers.1", "nowhere"], conservative=True)
    assert budgets == {"layers.1": pytest.approx(2.0)}
    assert report.compute_budgets_by_profile_label(["head"])["head"] == pytest.approx(2.0)
    table = flextensor.format_offload_timing_table(report)
    assert "6 passes" in table
    assert all(label in table for label in LABELS)
    manager.reset_offload_timing()
    assert manager.collect_offload_timing() is None
    manager.release()
    assert manager.collect_offload_timing() is None


def test_a_table_after_ten_passes_and_none_without_timing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = Stack(3)
    config = OffloadConfig(**QUICK, load_strategy=Everything(), offload_timing="eager")
    flextensor.offload(model, config)
    with caplog.at_level(logging.INFO, "modelopt_lite.offload"):
        for _ in range(3 + TOLD_PASSES + 1):  # the last copies may be read a pass later
            model(IDS)
    assert caplog.text.count(" passes, ms") == 1
    catch_up()
    assert not flextensor.update_offload_timing()  # nothing new
    report = flextensor.collect_offload_timing()
    assert report is not None
    assert report.passes == TOLD_PASSES + 1
    flextensor.reset_offload_timing()
    assert flextensor.collect_offload_timing() is None
    flextensor.release()
    flextensor.offload(model, config.model_copy(update={"offload_timing": "off"}))
    for _ in range(5):
        model(IDS)
    assert not flextensor.update_offload_timing()
    assert flextensor.collect_offload_timing() is None


def test_passes_beside_the_models_forward_are_timed() -> None:
    model: Any = Stack(3)
    flextensor.offload(
        model, OffloadConfig(**QUICK, load_strategy=Everything(), offload_timing="eager")
    )
    for _ in range(6):
        x = model.embed(IDS)
        for layer in model.layers:
            x = layer(x)
        flextensor.update_state()
    catch_up()
    report = flextensor.collect_offload_timing()
    assert report is not None
    assert report.passes == 3
    assert set(report.compute) == {"embed", "layers.0", "layers.1", "layers.2"}


def test_a_replays_number_is_read_once() -> None:
    model = Stack(3)
    manager, _ = sim_manager(model, offload_timing="eager")
    for _ in range(4):
        model(IDS)
    manager.device.synchronize()
    timing = OffloadTiming(tensors_of(manager).timeline, keep=2)
    assert timing.read(7)
    for _ in range(2):
        model(IDS)
    manager.device.synchronize()
    assert not timing.read(7)
    assert timing.read(8)
    assert [snapshot.number for snapshot in timing.snapshots] == [1, 2]  # of three, two are kept
    manager.release()


def test_statistics_of_times() -> None:
    found = TimingStatistics.of([1.0, 2.0, 6.0])
    assert (found.count, found.min, found.max, found.avg, found.median) == (3, 1.0, 6.0, 3.0, 2.0)
    assert found.std == pytest.approx((14 / 3) ** 0.5)


def test_timing_of_graphs_is_that_of_passes_where_there_are_none(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = Stack(3)
    for timing, told in (("cuda_graph", True), ("eager", False)):
        caplog.clear()
        with offloaded(model, "host", load_strategy=Everything(), offload_timing=timing) as manager:
            for _ in range(5):
                model(IDS)
            manager.device.synchronize()
            manager.update_offload_timing()
            report = manager.collect_offload_timing()
            assert report is not None
            assert report.passes == 2
        assert ("has no effect of its own on host" in caplog.text) is told


def test_the_capture_of_copies_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Stack(3)
    expected = model(IDS)
    keep = Everything(2, keep=lambda name: name.startswith("embed"))
    with offloaded(model, "host", load_strategy=keep) as manager:
        for _ in range(4):
            model(IDS)
        with monkeypatch.context() as patch:
            patch.setattr(type(manager.device), "capturing", lambda device: True)
            model.embed(IDS)  # stays on the device: nothing is copied
            with pytest.raises(OffloadError, match=r"captured through 'layers\.0'.*compile_fn"):
                model(IDS)
        assert_same(model(IDS), expected)
