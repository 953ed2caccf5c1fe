"""Reading ahead: right whatever the order, within the budget, each unit read once in order."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from modelopt_lite.errors import CheckpointError
from modelopt_lite.offload.prefetch import Prefetcher
from modelopt_lite.offload.store import Loaded
from modelopt_lite.offload.units import Unit

SIZES = (5, 3, 3, 3, 8, 1)
UNITS = [Unit(f"u{i}", (), True) for i in range(len(SIZES))]


class FakeStore:
    """Counts loads and the bytes that are out; fails for one unit if told to."""

    def __init__(self, fails: str | None = None) -> None:
        self.loads: Counter[str] = Counter()
        self.out = self.peak = 0
        self.fails = fails
        self.lock = threading.Lock()

    def bytes_of(self, unit: Unit) -> int:
        return SIZES[int(unit.name[1:])]

    def load(self, unit: Unit) -> Loaded:
        if unit.name == self.fails:
            raise CheckpointError(unit.name)
        with self.lock:
            self.loads[unit.name] += 1
            self.out += self.bytes_of(unit)
            self.peak = max(self.peak, self.out)
        return Loaded(unit, torch.empty(0), {})

    def release(self, loaded: Loaded) -> None:
        with self.lock:
            self.out -= self.bytes_of(loaded.unit)


def prefetcher(store: Any, budget: int) -> Prefetcher:
    return Prefetcher(store, UNITS, budget=budget)


@pytest.mark.parametrize("budget", [1, 8, 11, 1000])
def test_in_order_each_unit_is_read_once(budget: int) -> None:
    store = FakeStore()
    with prefetcher(store, budget) as ahead:
        for unit in UNITS:
            loaded = ahead.take(unit)
            assert loaded.unit is unit
            ahead.done(loaded)
    assert set(store.loads.values()) == {1}
    assert store.peak <= max(budget, *SIZES)
    assert ahead.peak >= store.peak


@settings(max_examples=60, deadline=None)
@given(
    order=st.lists(st.sampled_from(range(len(SIZES))), min_size=1, max_size=12),
    budget=st.integers(1, 20),
)
def test_any_order_gets_what_it_asks_for(order: list[int], budget: int) -> None:
    store = FakeStore()
    with prefetcher(store, budget) as ahead:
        for index in order:
            loaded = ahead.take(UNITS[index])
            assert loaded.unit is UNITS[index]
            ahead.done(loaded)
    assert store.peak <= max(budget, *SIZES)


def test_units_ahead_are_in_memory_before_they_are_asked_for() -> None:
    store = FakeStore()
    with prefetcher(store, 1000) as ahead:
        held = [ahead.take(UNITS[0])]
        held += [ahead.take(unit) for unit in UNITS[1:]]
        late = ahead.late
        for loaded in held:
            ahead.done(loaded)
    assert late <= 1  # the first, where the thread had not started yet
    assert store.out == 0


def test_an_error_of_the_reader_reaches_the_caller() -> None:
    store = FakeStore(fails="u2")
    with prefetcher(store, 1000) as ahead:
        for unit in UNITS[:2]:
            ahead.done(ahead.take(unit))
        with pytest.raises(CheckpointError, match="u2"):
            ahead.take(UNITS[2])
