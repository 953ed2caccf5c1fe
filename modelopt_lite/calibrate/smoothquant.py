"""SmoothQuant: move the spread of input channels into the weights.

Source: Xiao et al., SmoothQuant, arXiv:2211.10438. Shape suffix: K columns (input channels).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from modelopt_lite.calibrate.algorithm import Algorithm, Choices, Each, Weight, here
from modelopt_lite.calibrate.smoothing import (
    MAX_SCALE,
    MIN_SCALE,
    averaged_choices,
    shared_choices,
)
from modelopt_lite.calibrate.statistics import Kind
from modelopt_lite.formats.base import Numerics
from modelopt_lite.formats.linear import LinearFormat

# Channels whose inputs are smaller carry nothing, and would get an endless scale.
_NOTHING = 2.0**-31


class SmoothQuant(Algorithm):
    """Scales input channels by ``w ** (1 - alpha) / x ** alpha``, both largest magnitudes.

    With alpha 1 every channel of the inputs reaches the same magnitude.
    """

    kinds: frozenset[Kind] = frozenset({"channels"})

    def __init__(self, numerics: Numerics, *, alpha: float) -> None:
        super().__init__(numerics)
        self._alpha = alpha

    def problem(self, fmt: LinearFormat) -> str | None:
        """See `Algorithm`."""
        return None if fmt.inputs.rounds else "it leaves inputs as they are, so none need smoothing"

    def choose(self, weights: Sequence[Weight], each: Each = here) -> Choices:
        """See `Algorithm`."""
        if self.numerics == "modelopt":
            return averaged_choices(weights, [self._scale([weight]) for weight in weights])
        return shared_choices(weights, self._scale(weights, each), each)

    def _scale(self, weights: Sequence[Weight], each: Each = here) -> Tensor:
        """Return one scale [K], float32, for some matrices; 1 where nothing was seen."""
        found = [w.amax for w in weights if w.amax is not None]
        w_amax_K = torch.stack(each(weights, lambda w: w.read().abs().amax(0))).amax(0)
        if not found:
            return torch.ones_like(w_amax_K, dtype=torch.float32)
        x_amax_K = torch.stack(found).amax(0).float()
        scale_K = w_amax_K.pow(1 - self._alpha) / x_amax_K.pow(self._alpha)
        if scale_K.min() <= _NOTHING or self.numerics == "exact":
            scale_K = torch.where(x_amax_K <= _NOTHING, 1.0, scale_K)
        return scale_K.clamp(MIN_SCALE, MAX_SCALE)
