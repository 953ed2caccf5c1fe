"""AWQ: scale up the input channels of weights that matter, so that they lose less in rounding.

Source: Lin et al., AWQ, arXiv:2306.00978. Shape suffixes: R rows (output channels), K columns
(input channels), T rows of inputs (tokens).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from modelopt_lite.calibrate.algorithm import Algorithm, Choices, Each, Weight, here
from modelopt_lite.calibrate.observe import Site
from modelopt_lite.calibrate.peer import fake_quantize_as_peer, peer_problem
from modelopt_lite.calibrate.smoothing import (
    MAX_SCALE,
    MIN_SCALE,
    averaged_choices,
    shared_choices,
)
from modelopt_lite.calibrate.statistics import Kind
from modelopt_lite.formats.base import Numerics
from modelopt_lite.formats.linear import LinearFormat

# Rows kept to compare scales by: a layer's, and an expert's, of which there are many.
_ROWS = 2048
_EXPERT_ROWS = 256
_TINY = torch.finfo(torch.float32).tiny


class AWQLite(Algorithm):
    """Searches the power ``alpha`` in ``x ** alpha / w ** (1 - alpha)`` that loses least.

    x is the mean magnitude of an input channel, w that of a column of the weights in units of its
    blocks' largest. The loss is that of the products with a sample of the inputs.
    """

    kinds: frozenset[Kind] = frozenset({"channels", "rows"})

    def __init__(self, numerics: Numerics, *, alpha_step: float) -> None:
        super().__init__(numerics)
        self._alphas = torch.arange(0, 1.0 + alpha_step, alpha_step).tolist()

    def row_limit(self, site: Site) -> int | None:
        """See `Algorithm`; Model Optimizer compares by all inputs."""
        if self.numerics == "modelopt":
            return None
        return _ROWS if site.expert is None else _EXPERT_ROWS

    def problem(self, fmt: LinearFormat) -> str | None:
        """See `Algorithm`."""
        return peer_problem(fmt) if self.numerics == "modelopt" else None

    def scratch(self, rows: int, columns: int, seen: int) -> int:
        """See `Algorithm`: the matrix, scaled, and rounded; inputs; products."""
        return 13 * rows * columns + 6 * seen * columns + 4 * seen * rows

    def reads(self, fmt: LinearFormat) -> int:
        """See `Algorithm`."""
        return 1 if self.numerics == "modelopt" else 2

    def choose(self, weights: Sequence[Weight], each: Each = here) -> Choices:
        """See `Algorithm`."""
        if self.numerics == "modelopt":
            return averaged_choices(weights, [self._peer_scale(weight) for weight in weights])
        return shared_choices(weights, 1 / self._shared_scale(weights, each), each)

    def _shared_scale(self, weights: Sequence[Weight], each: Each) -> Tensor:
        """Return the scale [K] of columns under which all matrices together lose least."""
        w_K, rows = torch.zeros(()), 0
        seen = {weight.site: weight.seen for weight in weights if weight.seen is not None}
        for sum_K, count in each(weights, _summed_sizes):
            w_K = w_K.to(sum_K.device) + sum_K
            rows += count
        if not seen:
            return torch.ones_like(w_K)
        x_K = torch.stack([s.sum for s in seen.values() if s.sum is not None]).sum(0)
        count = sum(s.count for s in seen.values())
        scales = [channel_scale(x_K / count, w_K / rows, alpha) for alpha in self._alphas]
        losses = torch.zeros(len(scales), dtype=torch.float64, device=w_K.device)
        reached = [weight for weight in weights if weight.seen is not None]
        for loss in each(reached, lambda weight: _losses(weight, scales)):
            losses += loss
        return scales[int(losses.argmin())]

    def _peer_scale(self, weight: Weight) -> Tensor:
        """Return the ``pre_quant_scale`` that Model Optimizer finds for one matrix, float32 [K]."""
        w_RK, seen = weight.read(), weight.seen
        if seen is None or seen.mean is None:
            return torch.ones(w_RK.shape[1], device=w_RK.device)
        w_K = _column_sizes(w_RK, weight.format.group_size).mean(0).float()
        x_K = seen.mean / seen.calls
        scales = [channel_scale(x_K, w_K, alpha) for alpha in self._alphas]
        actual = [functional.linear(x_TK, w_RK) for x_TK in seen.rows]
        losses = []
        for scale_K in scales:
            inverse_K = (1 / scale_K).to(w_RK.dtype)
            rounded_RK = fake_quantize_as_peer(w_RK * scale_K.to(w_RK.dtype), weight.format)
            total = torch.zeros(())
            for x_TK, y_TR in zip(seen.rows, actual, strict=True):
                out_TR = functional.linear(x_TK * inverse_K, rounded_RK)
                total += (out_TR - y_TR).float().pow(2).mean()
            losses.append(float(total))
        return 1.0 / scales[losses.index(min(losses))]


def channel_scale(x_K: Tensor, w_K: Tensor, alpha: float) -> Tensor:
    """Return ``x ** alpha / w ** (1 - alpha)``, its largest the inverse of its smallest.

    Args:
        x_K: float32 [K] >= 0, mean magnitudes of input channels.
        w_K: float32 [K] >= 0, mean relative magnitudes of the columns.
        alpha: From 0 to 1.
    """
    scale_K = (x_K.pow(alpha) / (w_K.pow(1 - alpha) + _TINY)).clamp(MIN_SCALE, MAX_SCALE)
    return scale_K / (scale_K.max() * scale_K.min()).sqrt()


def _column_sizes(w_RK: Tensor, block: int | None) -> Tensor:
    """Return each magnitude in units of the largest of its block, in the dtype of the weights."""
    size = w_RK.abs().contiguous().view(-1, block or w_RK.shape[1])
    largest = size.amax(dim=1, keepdim=True)
    return (size / (largest + torch.finfo(w_RK.dtype).tiny)).view(w_RK.shape)


def _summed_sizes(weight: Weight) -> tuple[Tensor, int]:
    """Return the sums [K], float32, over rows of what `_column_sizes` gives, and their number."""
    sizes_RK = _column_sizes(weight.read(), weight.format.group_size)
    return sizes_RK.sum(0, dtype=torch.float32), len(sizes_RK)


def _losses(weight: Weight, scales: Sequence[Tensor]) -> Tensor:
    """Return the squared error of the products under each scale, for all rows seen, float64."""
    assert weight.seen is not None
    x_TK = torch.cat(weight.seen.rows).float()
    w_RK = weight.read().float()
    codec = weight.format.codec
    losses = []
    for scale_K in scales:
        scaled_RK = w_RK * scale_K
        kept = codec.quantize(scaled_RK, None, numerics="exact")
        error_RK = codec.dequantize(kept, torch.float32).sub_(scaled_RK).div_(scale_K)
        losses.append(torch.linalg.vector_norm(x_TK @ error_RK.T, dtype=torch.float64) ** 2)
    return torch.stack(losses) * (weight.seen.count / len(x_TK))
