"""A plan takes no more than the device has free, asked for or not."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from oracle import assert_same, offloaded, tensors_of
from torch import Tensor, nn

from modelopt_lite.errors import StrategyComputeError
from modelopt_lite.offload.device import MemoryInfo
from modelopt_lite.offload.simdevice import SimDevice

WIDTH = 192  # a layer of 147 kB: smaller tensors are not worth to be moved


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x


LAYER = WIDTH * (WIDTH + 1) * 4


class Shared(SimDevice):
    """A device of which others have a part."""

    others = 0

    def memory_info(self) -> MemoryInfo:
        free, total = super().memory_info()
        return MemoryInfo(free - self.others, total)


def run(device: Shared, **fields: Any) -> int:
    """Check outputs on a bus on which nothing can be hidden; return the most bytes taken."""
    torch.manual_seed(0)
    model, x = Stack().eval(), torch.randn(2, WIDTH)
    with torch.no_grad():
        expected = model(x)
        with offloaded(model, device, **fields) as manager:
            for _ in range(3):
                assert_same(model(x), expected)
            ledger = tensors_of(manager).ledger
            ledger.reset_peaks()
            for _ in range(3):
                assert_same(model(x), expected)
            return int(ledger.peak("device"))


def slow(capacity: int) -> Shared:
    return Shared(capacity, curve=lambda size: 1e3 + size)


def test_without_a_budget_what_is_free_is_one(caplog: pytest.LogCaptureFixture) -> None:
    assert run(slow(8 * LAYER)) >= 6 * LAYER  # all of it stays
    assert "are free" not in caplog.text
    caplog.clear()
    device = slow(8 * LAYER)
    device.others = 4 * LAYER
    assert 2 * LAYER <= run(device) <= 4 * LAYER
    [message] = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert f"{4 * LAYER:,} are free" in message


def test_too_little_free() -> None:
    device = slow(8 * LAYER)
    device.others = 8 * LAYER - LAYER // 2
    with pytest.raises(StrategyComputeError, match="what is free") as caught:
        run(device)
    assert caught.value.smallest_budget is not None
    device = slow(8 * LAYER)
    device.others = 8 * LAYER - caught.value.smallest_budget
    assert run(device) <= caught.value.smallest_budget


def test_a_budget_beyond_what_is_free_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    device = slow(8 * LAYER)
    device.others = 5 * LAYER
    run(device, max_gpu_mem_fraction=0.5)
    [message] = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert message.startswith(f"the budget is {4 * LAYER:,} bytes, and {3 * LAYER:,} are free")
    caplog.clear()
    device = slow(8 * LAYER)
    device.others = 3 * LAYER
    run(device, max_gpu_mem_fraction=0.5)
    assert not caplog.records
