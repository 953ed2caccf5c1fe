"""Rows, tables and traces of an offloaded model."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from modelopt_lite.errors import OffloadError
from modelopt_lite.offload.config import OffloadConfig
from modelopt_lite.offload.device import HostDevice
from modelopt_lite.offload.diagnostics import (
    diagnostics_text,
    ledger_table,
    log_diagnostics,
    size_text,
    unit_rows,
    write_trace,
)
from modelopt_lite.offload.manager import OffloadManager, Phase

X = torch.ones(2, 200)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(200, 200) for _ in range(5))
        self.head = nn.Linear(200, 3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        made: Tensor = self.head(x)
        return made


@pytest.fixture
def offloaded() -> Iterator[tuple[OffloadManager, Net]]:
    manager, model = OffloadManager("shown", device=HostDevice()), Net().requires_grad_(False)
    manager.offload(
        model,
        OffloadConfig(
            include_patterns=["layers.*"],
            profiling_iters=3,
            enable_diagnostics=True,
            transfer_budget_scale=1e9,
        ),
    )
    yield manager, model
    manager.release()


def run_to_inference(manager: OffloadManager, model: Net) -> None:
    while manager.phase is not Phase.INFERENCE:
        model(X)
    for _ in range(3):
        model(X)


def test_rows_tell_of_every_label(offloaded: tuple[OffloadManager, Net]) -> None:
    manager, model = offloaded
    assert all(row.samples == 0 and row.block is None for row in unit_rows(manager))
    run_to_inference(manager, model)
    rows = unit_rows(manager)
    assert [row.label for row in rows] == [f"layers.{i}" for i in range(5)]
    for row in rows:
        assert row.samples == 3
        assert row.min_ms <= row.median_ms <= row.max_ms
        assert row.moved_bytes <= row.nbytes
        assert (row.block is None) == (row.copy_ms == 0) == (row.moved_bytes == 0)
    assert sum(row.moved_bytes > 0 for row in rows) >= 2


def test_the_text_has_all_tables(offloaded: tuple[OffloadManager, Net]) -> None:
    manager, model = offloaded
    assert "DISCOVERY" in diagnostics_text(manager)
    run_to_inference(manager, model)
    text = diagnostics_text(manager)
    for part in ("layers.4", "stall ms", "GB/s", "blocks", "resident", "in all", "by the plan"):
        assert part in text
    assert ledger_table(manager.get_tensor_manager().ledger).row_count >= 5  # type: ignore[union-attr]


def test_diagnostics_are_logged(
    offloaded: tuple[OffloadManager, Net], caplog: pytest.LogCaptureFixture
) -> None:
    manager, model = offloaded
    with caplog.at_level(logging.INFO, "modelopt_lite.offload.diagnostics"):
        run_to_inference(manager, model)
        assert caplog.text.count("stall ms") == 1
        log_diagnostics(manager)
    assert caplog.text.count("stall ms") == 2


def test_the_trace_has_copies_and_computes(
    offloaded: tuple[OffloadManager, Net], tmp_path: Path
) -> None:
    manager, model = offloaded
    with pytest.raises(OffloadError, match="no pass was recorded"):
        write_trace(manager, tmp_path / "trace.json")
    run_to_inference(manager, model)
    events = json.loads(write_trace(manager, tmp_path / "trace.json").read_text())["traceEvents"]
    assert {"copy", "compute"} <= {event.get("cat") for event in events}


def test_nothing_to_tell_of() -> None:
    with pytest.raises(OffloadError, match="call offload"):
        unit_rows(OffloadManager("empty"))


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (999, "999 B"), (8_310_000, "8.31 MB"), (2e12, "2 TB")]
)
def test_sizes(count: int, text: str) -> None:
    assert size_text(count) == text
