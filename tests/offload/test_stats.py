from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from modelopt_lite.offload.stats import (
    LayerStatistics,
    LayerStatisticsCollector,
    TensorStatistics,
    TransferCurve,
    curve_from_tensors,
    quality_warnings,
)

DATA: dict[str, Any] = json.loads(
    (Path(__file__).parent.parent / "data" / "offload" / "strategies.json").read_text()
)
CURVE = TransferCurve({int(size): ms for size, ms in DATA["memory_transfers"].items()})


def tensor(
    name: str, size: int, ms: float | None = None, inner: tuple[int, ...] = ()
) -> TensorStatistics:
    return TensorStatistics(
        tensor_id=name, name=name, size_bytes=size, load_time_ms=ms, inner_ids=inner
    )


@pytest.mark.parametrize("vector", DATA["interpolator"])
def test_interpolator_vectors(vector: dict[str, float]) -> None:
    """The vectors are printed with nine decimals of a ms and three of a byte."""
    assert CURVE.ms(vector["bytes"]) == pytest.approx(vector["ms"], rel=1e-8, abs=6e-10)
    # The times of the first vectors are what was rounded: 1000 bytes come back as 999.997.
    assert CURVE.bytes_in(vector["ms"]) == pytest.approx(vector["bytes"], rel=5e-6)


@given(
    st.dictionaries(st.integers(1, 10**10), st.floats(1e-4, 1e4), min_size=1, max_size=6),
    st.integers(1, 10**11),
)
def test_curve_is_monotone_and_inverse(points: dict[int, float], size: int) -> None:
    curve = TransferCurve(points)
    kept = list(curve.points.values())
    assert kept == sorted(kept)
    ms = curve.ms(size)
    assert curve.ms(2 * size) >= ms * (1 - 1e-9)
    if len(set(kept)) == len(kept) > 1 and min(b / a for a, b in itertools.pairwise(kept)) > 1.01:
        assert curve.bytes_in(ms) == pytest.approx(size, rel=1e-6)


def test_curve_passes_through_its_points() -> None:
    assert CURVE.ms(4 << 20) == pytest.approx(0.17)
    assert CURVE.bytes_in(0.65) == pytest.approx(16 << 20)


def test_one_point_is_a_constant() -> None:
    curve = TransferCurve({100: 2.0})
    assert curve.ms(1) == curve.ms(10**9) == pytest.approx(2.0)
    assert curve.bytes_in(0.1) == curve.bytes_in(50.0) == pytest.approx(100.0)


def test_noise_is_raised_and_a_flat_end_has_no_limit() -> None:
    curve = TransferCurve({100: 2.0, 200: 1.0})
    assert curve.points == {100: 2.0, 200: 2.0}
    assert curve.bytes_in(2.0) == math.inf
    flat = TransferCurve({100: 1.0, 200: 2.0, 400: 1.5, 800: 4.0})
    assert flat.bytes_in(2.0) == pytest.approx(400.0)
    assert flat.bytes_in(1.9) < 200 < flat.bytes_in(2.1)


@pytest.mark.parametrize(
    "points", [{}, {0: 1.0}, {1: 0.0}, {1: math.inf}, {1: math.nan}, {-1: 1.0}]
)
def test_bad_points(points: dict[int, float]) -> None:
    with pytest.raises(ValueError):
        TransferCurve(points)


@pytest.mark.parametrize("value", [0, -1])
def test_bad_arguments(value: float) -> None:
    with pytest.raises(ValueError, match="above 0"):
        CURVE.ms(value)
    with pytest.raises(ValueError, match="above 0"):
        CURVE.bytes_in(value)


def test_curve_from_tensors_averages_by_size() -> None:
    layers = [
        LayerStatistics(
            label="a", duration=1, tensors=(tensor("x", 10, 1.0), tensor("y", 10, 3.0))
        ),
        LayerStatistics(label="b", duration=1, tensors=(tensor("z", 20, 5.0), tensor("w", 7))),
    ]
    assert curve_from_tensors(layers).points == {10: 2.0, 20: 5.0}
    with pytest.raises(ValueError, match="memory_stats"):
        curve_from_tensors(layers[:0])


def test_layer_counts_inner_fields() -> None:
    layer = LayerStatistics(
        label="a", duration=1, tensors=(tensor("w", 8, inner=(3, 4)), tensor("b", 2))
    )
    assert layer.tensor_ids == ("w", 3, 4, "b")
    assert layer.size_bytes == 10


def test_bad_statistics() -> None:
    with pytest.raises(ValueError, match="size_bytes is -1"):
        tensor("x", -1)
    with pytest.raises(ValueError, match="load_time_ms is nan"):
        tensor("x", 1, math.nan)
    with pytest.raises(ValueError, match="duration is -1"):
        LayerStatistics(label="a", tensors=(), duration=-1)


@pytest.mark.parametrize(
    ("samples", "words"),
    [
        ([1.0, 1.0], "2 timing sample(s)"),
        ([1.0, 1.0, 1.0], None),
        ([1.0, 2.0, 1.0, 2.0], "vary by 33%"),
        ([1.0, 1.0, 1.0, 1.0, 9.0], None),  # one outlier: the median does not see it
        ([0.0, 0.0, 0.0], None),
    ],
)
def test_quality(samples: list[float], words: str | None) -> None:
    warnings = quality_warnings("l0", samples)
    assert (words in warnings[0]) if words else not warnings


def test_collector() -> None:
    collector = LayerStatisticsCollector()
    collector.record("b", 3.0)
    collector.set_tensors("a", [tensor("x", 5)])
    for ms in (1.0, 9.0, 2.0):
        collector.record("b", ms)
    stats = collector.get_layer_stats()
    assert [(s.label, s.duration, s.tensor_ids) for s in stats] == [
        ("b", 2.5, ()),
        ("a", 0.0, ("x",)),
    ]
    timed, warnings = collector.timed_layer_stats()
    assert [s.label for s in timed] == ["b"]
    assert warnings == ["a: never timed; left out of the plan, stays resident"]
    assert collector.samples() == {"b": (3.0, 1.0, 9.0, 2.0), "a": ()}
    collector.clear_durations()
    assert [s.duration for s in collector.get_layer_stats()] == [0.0, 0.0]
    with pytest.raises(ValueError, match="timing sample of -1"):
        collector.record("b", -1)
