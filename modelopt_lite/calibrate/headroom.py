"""Leave room above the largest inputs that calibration saw: NVFP4 inputs that never saturate.

NVFP4's global scale says up to which magnitude a block's E4M3 scale reaches. Under the scale of the
largest input all larger ones of later texts are clipped, while E4M3 reaches far below what is ever
needed. The scale that is chosen puts the smallest blocks that count near the lower end instead.

Source: Model Optimizer 0.47, calibrator ``NVFP4ActHeadroomCalibrator``. Shape suffix: H bins.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from modelopt_lite.calibrate.algorithm import Algorithm, Choice, Choices, Each, Weight, here
from modelopt_lite.calibrate.statistics import LOG2_RANGE, Kind, histogram_bins
from modelopt_lite.errors import RecipeError
from modelopt_lite.formats import inputs
from modelopt_lite.formats.base import E4M3_MAX, E4M3_MIN_NORMAL, Numerics
from modelopt_lite.formats.linear import LinearFormat

_NORMAL_RANGE = E4M3_MAX / E4M3_MIN_NORMAL  # 28672
# Blocks that are smaller than the upper end by more than this count as nothing.
_NOTHING = 1e6


class ActHeadroom(Algorithm):
    """Sets the amax of inputs to ``max(rho * anchor, upper)``, percentiles of blocks' magnitudes.

    Magnitudes are those of 16 neighbours, 0 left out, in a histogram of 512 bins of log2; a
    percentile is known to half a bin, 2 ** (5 / 64), about 6 %. Weights keep the scales of their
    largest magnitudes.

    Args:
        numerics: See `Algorithm`.
        anchor_percentile: Above 0, at most 100.
        upper_percentile: The same; 100 takes the largest input itself.
        rho: Above 0, below 28672, the range of E4M3's normal numbers.

    Raises:
        RecipeError: A number outside of its range.
    """

    kinds: frozenset[Kind] = frozenset({"histogram"})

    def __init__(
        self, numerics: Numerics, *, anchor_percentile: float, upper_percentile: float, rho: float
    ) -> None:
        super().__init__(numerics)
        percentiles = {"anchor_percentile": anchor_percentile, "upper_percentile": upper_percentile}
        for name, value in percentiles.items():
            if not 0 < value <= 100:
                raise RecipeError(f"algorithm.{name} is {value}; give one above 0, at most 100")
        if not 0 < rho < _NORMAL_RANGE:
            raise RecipeError(
                f"algorithm.rho is {rho}; give one above 0 and below {_NORMAL_RANGE:.0f}, the "
                "range of E4M3's normal numbers"
            )
        self._anchor, self._upper, self._rho = anchor_percentile, upper_percentile, rho

    def problem(self, fmt: LinearFormat) -> str | None:
        """See `Algorithm`."""
        if fmt.inputs == inputs.NVFP4:
            return None
        return "its inputs have no global scale of NVFP4 to leave room in"

    def reads(self, fmt: LinearFormat) -> int:
        """See `Algorithm`."""
        return 0

    def choose(self, weights: Sequence[Weight], each: Each = here) -> Choices:
        """See `Algorithm`; all that read one tensor share the scale of what entered any."""
        seen = {weight.site: weight.seen for weight in weights if weight.seen is not None}
        counts = [s.histogram for s in seen.values() if s.histogram is not None]
        if not counts:
            return {weight.key: Choice() for weight in weights}
        largest = torch.stack([s.largest for s in seen.values() if s.largest is not None]).max()
        amax = self.amax(torch.stack(counts).sum(0), largest.float())
        return {weight.key: Choice(input_amax=amax) for weight in weights}

    def amax(self, counts_H: Tensor, largest: Tensor) -> Tensor:
        """Return the amax for a histogram, int64 [512], and the largest magnitude; float32 []."""
        if not int(counts_H.sum()):
            return largest
        upper = float(largest) if self._upper == 100 else percentile(counts_H, self._upper)
        floor = torch.tensor(upper / _NOTHING)
        counted_H = counts_H.clone()
        counted_H[: int(histogram_bins(floor))] = 0
        anchor = percentile(counted_H, self._anchor)
        return torch.tensor(max(self._rho * anchor, upper), device=largest.device)


def percentile(counts_H: Tensor, percent: float) -> float:
    """Return the middle, by its logarithm, of the bin that a percentile of what was counted is in.

    Args:
        counts_H: int64 [H], not all 0, of equal bins of log2 over ``LOG2_RANGE``.
        percent: Above 0, at most 100.
    """
    low, high = LOG2_RANGE
    # Of a float32 in the peer, whose sums past 2**24 are rounded: there the bins may differ by one.
    wanted = percent / 100 * int(counts_H.sum())
    place = int((counts_H.cumsum(0) < wanted).sum())
    return math.pow(2.0, low + (place + 0.5) / len(counts_H) * (high - low))
