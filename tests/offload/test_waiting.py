"""Waiting passes: the same values come back, within the budgets."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from modelopt_lite.errors import OutputError
from modelopt_lite.offload import Lockstep
from modelopt_lite.offload.waiting import Waiting

WIDTH = 8


class Residual(nn.Module):
    """Keeps its first input and a view of each hidden state until the end."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        first = hidden = x * 2
        views = []
        for layer in self.layers:
            hidden = hidden + layer(hidden).tanh()
            views.append(hidden[1:])
        return hidden + first + torch.stack([view.sum() for view in views]).sum()


def run(
    model: Residual, batches: list[Tensor], waiting: Waiting
) -> tuple[list[Tensor], dict[str, int]]:
    units = {f"layers.{i}": layer for i, layer in enumerate(model.layers)}
    lockstep = Lockstep(units, enter=lambda n: None, leave=lambda n: None, waiting=waiting)
    with torch.inference_mode(), waiting:
        results = lockstep.run([lambda b=b: model(b) for b in batches])  # type: ignore[misc]
    return results, lockstep.entries


@pytest.mark.parametrize("budget", [0, 500, 1500, 10**9])
def test_values_come_back(budget: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Residual()
    batches = [torch.randn(rows, WIDTH) for rows in (3, 9, 5, 7)]
    with torch.inference_mode():
        expected = [model(batch) for batch in batches]
    waiting = Waiting(budget, tmp_path, smallest=1)
    results, entries = run(model, batches, waiting)
    assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))
    assert set(entries.values()) == {1}
    assert waiting.peak <= budget
    assert (waiting.disk_peak > 0) == (budget < 10**9)
    assert list(tmp_path.iterdir()) == []


def test_all_of_it_is_counted(tmp_path: Path) -> None:
    """Before the last layer a pass holds its first input and all hidden states."""
    model, batches = Residual(), [torch.randn(4, WIDTH)]
    waiting = Waiting(10**9, tmp_path, smallest=1)
    run(model, batches, waiting)
    assert waiting.peak == 4 * batches[0].nbytes


def test_small_tensors_stay(tmp_path: Path) -> None:
    waiting = Waiting(0, tmp_path)
    run(Residual(), [torch.randn(4, WIDTH)], waiting)
    assert waiting.peak == waiting.disk_peak == 0


def test_a_disk_budget_that_is_too_small(tmp_path: Path) -> None:
    waiting = Waiting(0, tmp_path, 300, smallest=1)
    with pytest.raises(OutputError, match=r"more than the 300 bytes of disk_scratch; give more"):
        run(Residual(), [torch.randn(4, WIDTH)] * 3, waiting)


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    waiting = Waiting(0, tmp_path / "missing", smallest=1)
    with pytest.raises(OutputError, match="cannot be written to"):
        run(Residual(), [torch.randn(4, WIDTH)], waiting)
