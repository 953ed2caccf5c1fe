"""What was measured of a model: its tensors, how long each unit computes, how long copies take.

Times are milliseconds, sizes bytes. A *label* names a unit: the dotted path of a module, or the
name given to a manual block.
"""

from __future__ import annotations

import bisect
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

MIN_SAMPLES = 3  # fewer cannot tell a typical pass from an odd one
MAX_VARIATION = 0.25  # standard deviation over mean
OUTLIER_RATIO = 1.2  # mean over median: above it a few slow passes explain the variation

TensorId = int | str


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorStatistics:
    """One tensor that may be offloaded.

    ``size_bytes`` is what the tensor occupies on the device, its inner fields (``weight.scale``)
    included: whoever packs tensors at an alignment rounds up before, so that plans are exact.
    ``load_time_ms`` is the measured copy time; None where only a curve was measured.
    """

    tensor_id: TensorId
    name: str
    size_bytes: int
    load_time_ms: float | None = None
    inner_ids: tuple[TensorId, ...] = ()

    def __post_init__(self) -> None:
        if self.size_bytes < 0:
            raise ValueError(f"tensor {self.name!r}: size_bytes is {self.size_bytes}, below 0")
        if self.load_time_ms is not None and not 0 <= self.load_time_ms < math.inf:
            raise ValueError(
                f"tensor {self.name!r}: load_time_ms is {self.load_time_ms}; it must be >= 0"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerStatistics:
    """One unit: its tensors and its compute time. Without tensors it is a gap, which only waits."""

    label: str
    tensors: tuple[TensorStatistics, ...]
    duration: float

    def __post_init__(self) -> None:
        if not 0 <= self.duration < math.inf:
            raise ValueError(f"{self.label}: duration is {self.duration} ms; it must be >= 0")

    @property
    def tensor_ids(self) -> tuple[TensorId, ...]:
        """Ids of the tensors, each followed by those of its inner fields."""
        return tuple(i for t in self.tensors for i in (t.tensor_id, *t.inner_ids))

    @property
    def size_bytes(self) -> int:
        """Sum of the tensors' sizes."""
        return sum(t.size_bytes for t in self.tensors)


class TransferCurve:
    """Copy time by size: piecewise linear in log(bytes) and log(ms), extrapolated at both ends.

    One point makes a constant. A point that is faster than a smaller one is noise: it is raised to
    the smaller one's time, so that both directions are monotone.
    """

    def __init__(self, points: Mapping[int, float]) -> None:
        """Take measured points.

        Args:
            points: Copy size in bytes -> time in ms, at least one, all above 0.

        Raises:
            ValueError: No point, or one that is not above 0 and finite.
        """
        if not points:
            raise ValueError("a transfer curve needs at least one measured (bytes, ms) point")
        for size, ms in points.items():
            if not (0 < size < math.inf and 0 < ms < math.inf):
                raise ValueError(f"transfer point {size} bytes in {ms} ms: both must be above 0")
        sizes = sorted(points)
        times: list[float] = []
        for size in sizes:
            times.append(max(points[size], times[-1] if times else 0.0))
        self._points = dict(zip(sizes, times, strict=True))
        self._log_bytes = [math.log(size) for size in sizes]
        self._log_ms = [math.log(ms) for ms in times]

    @property
    def points(self) -> dict[int, float]:
        """The points used, by size."""
        return dict(self._points)

    def ms(self, size: float) -> float:
        """Return the time of one copy of ``size`` bytes.

        Raises:
            ValueError: ``size`` is not above 0.
        """
        return _interpolate(self._log_bytes, self._log_ms, size, "bytes")

    def bytes_in(self, ms: float) -> float:
        """Return the largest copy that takes ``ms``; infinite where time stops growing with size.

        Raises:
            ValueError: ``ms`` is not above 0.
        """
        if len(self._log_ms) > 1 and self._log_ms[-1] == self._log_ms[-2]:
            return math.inf if math.log(_positive(ms, "ms")) >= self._log_ms[-1] else self._low(ms)
        return self._low(ms)

    def _low(self, ms: float) -> float:
        return _interpolate(self._log_ms, self._log_bytes, ms, "ms")


def _positive(value: float, unit: str) -> float:
    if not value > 0:
        raise ValueError(f"a copy of {value} {unit} has no time or size: give a value above 0")
    return value


def _interpolate(xs: Sequence[float], ys: Sequence[float], value: float, unit: str) -> float:
    """Follow the line through the two points around log(value); the last two beyond the ends."""
    x = math.log(_positive(value, unit))
    if len(xs) == 1:
        return math.exp(ys[0])
    right = min(max(bisect.bisect_right(xs, x), 1), len(xs) - 1)
    left = right - 1
    while left > 0 and xs[left] == xs[right]:  # a flat piece, seen from its other axis
        left -= 1
    if xs[left] == xs[right]:
        return math.exp(ys[right] if x >= xs[right] else ys[left])
    slope = (ys[right] - ys[left]) / (xs[right] - xs[left])
    return math.exp(ys[left] + slope * (x - xs[left]))


def curve_from_tensors(layers: Iterable[LayerStatistics]) -> TransferCurve:
    """Build a curve from the tensors' own load times, averaged by size.

    Raises:
        ValueError: No tensor has a load time above 0.
    """
    times: dict[int, list[float]] = {}
    for tensor in (t for layer in layers for t in layer.tensors):
        if tensor.load_time_ms and tensor.size_bytes:
            times.setdefault(tensor.size_bytes, []).append(tensor.load_time_ms)
    if not times:
        raise ValueError(
            "no tensor has a measured load time: give memory_stats ({bytes: ms}), or profile first"
        )
    return TransferCurve({size: statistics.fmean(ms) for size, ms in times.items()})


def quality_warnings(label: str, samples_ms: Sequence[float]) -> list[str]:
    """Say why the median of these samples may not be trusted; empty where it may."""
    if len(samples_ms) < MIN_SAMPLES:
        return [
            f"{label}: {len(samples_ms)} timing sample(s), fewer than {MIN_SAMPLES}; "
            "raise profiling_iters"
        ]
    mean, median = statistics.fmean(samples_ms), statistics.median(samples_ms)
    variation = statistics.pstdev(samples_ms) / mean if mean > 0 else 0.0
    if variation <= MAX_VARIATION or mean >= OUTLIER_RATIO * median:
        return []  # the median does not see outliers
    return [
        f"{label}: timings vary by {variation:.0%} of their mean, more than {MAX_VARIATION:.0%}; "
        "profile with inputs of one shape on an idle machine"
    ]


@dataclass(slots=True)
class LayerStatisticsCollector:
    """Gathers tensors and timing samples by label, in the order in which labels are first seen."""

    _tensors: dict[str, tuple[TensorStatistics, ...]] = field(default_factory=dict)
    _samples: dict[str, list[float]] = field(default_factory=dict)

    def set_tensors(self, label: str, tensors: Iterable[TensorStatistics]) -> None:
        """Set the tensors of a label, replacing those it had."""
        self._see(label)
        self._tensors[label] = tuple(tensors)

    def record(self, label: str, duration_ms: float) -> None:
        """Add one timing sample.

        Raises:
            ValueError: The sample is negative or not finite.
        """
        if not 0 <= duration_ms < math.inf:
            raise ValueError(f"{label}: a timing sample of {duration_ms} ms; it must be >= 0")
        self._see(label)
        self._samples[label].append(duration_ms)

    def clear_durations(self) -> None:
        """Forget all timing samples; labels keep their order and tensors."""
        for samples in self._samples.values():
            samples.clear()

    def samples(self) -> dict[str, tuple[float, ...]]:
        """Timing samples by label, in order."""
        return {label: tuple(samples) for label, samples in self._samples.items()}

    def get_layer_stats(self) -> list[LayerStatistics]:
        """Return every label with its median duration; 0.0 before it was timed."""
        return [
            LayerStatistics(
                label=label,
                tensors=self._tensors[label],
                duration=statistics.median(samples) if samples else 0.0,
            )
            for label, samples in self._samples.items()
        ]

    def timed_layer_stats(self) -> tuple[list[LayerStatistics], list[str]]:
        """Return the labels that were timed, and warnings on the rest and on unsteady timings."""
        warnings: list[str] = []
        timed: list[LayerStatistics] = []
        for layer in self.get_layer_stats():
            samples = self._samples[layer.label]
            if samples:
                timed.append(layer)
                warnings += quality_warnings(layer.label, samples)
            else:
                warnings.append(f"{layer.label}: never timed; left out of the plan, stays resident")
        return timed, warnings

    def _see(self, label: str) -> None:
        self._samples.setdefault(label, [])
        self._tensors.setdefault(label, ())
