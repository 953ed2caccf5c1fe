"""The timeline of a run: few samples, in order, and nothing in the way."""

from __future__ import annotations

import pytest

from modelopt_lite.progress import Sample
from modelopt_lite.timeline import Timeline


class Clock:
    """Seconds that pass when they are told to; memory and bytes follow from them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.asked = 100.0, 0
        monkeypatch.setattr("modelopt_lite.timeline.time.monotonic", lambda: self.now)

    def sample(self) -> Sample:
        self.asked += 1
        passed = int(self.now - 100)
        return Sample(self.now, 7 + 2 * passed, 5 + passed, 1000 + passed)


def test_columns_count_from_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    taken = Timeline(lambda: 42, clock.sample)
    told: list[tuple[str, int, int]] = []
    tell = taken.around(lambda *step: told.append(step))
    for done in (1, 2):
        clock.now += 10
        tell("unit", done, 2)
    assert told == [("unit", 1, 2), ("unit", 2, 2)]
    assert taken.columns() == {
        "seconds": [0.0, 10.0, 20.0],
        "memory": [1000, 1010, 1020],
        "device": [42, 42, 42],
        "read": [0, 20, 40],
        "written": [0, 10, 20],
    }


def test_a_million_units_are_few_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    taken = Timeline(sample=clock.sample)
    tell = taken.around(lambda *step: None)
    for done in range(100_000):
        clock.now += 0.01
        tell("unit", done, 1_000_000)
    seconds = taken.columns()["seconds"]
    assert 100 < len(seconds) <= 256
    assert clock.asked < 2000
    assert seconds == sorted(seconds)
    assert seconds[-1] > 980


def test_what_is_told_may_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(phase: str, done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Timeline(sample=Clock(monkeypatch).sample).around(stop)("unit", 1, 2)
