"""Choose scales of weights by the squared error that rounding leaves.

Shape suffixes: R rows, K columns, B blocks in a row.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from modelopt_lite.calibrate.algorithm import Algorithm, Choice, Choices, Each, Weight, here
from modelopt_lite.calibrate.peer import round_to_steps, static_steps
from modelopt_lite.calibrate.sweep import best_block_scales, sweep_problem
from modelopt_lite.formats import base, nvfp4
from modelopt_lite.formats.base import E4M3_MAX, Numerics, row_chunks
from modelopt_lite.formats.codecs.base import Codec
from modelopt_lite.formats.linear import LinearFormat


class MeanSquaredError(Algorithm):
    """Tries multiples of the largest magnitude under each scale, or every E4M3 block scale.

    Args:
        numerics: See `Algorithm`.
        fp8_scale_sweep: Try all block scales; NVFP4 only.
        start_multiplier: The least multiple.
        stop_multiplier: The largest one.
        step_size: Between two of them, at most.
    """

    def __init__(
        self,
        numerics: Numerics,
        *,
        fp8_scale_sweep: bool,
        start_multiplier: float,
        stop_multiplier: float,
        step_size: float,
    ) -> None:
        super().__init__(numerics)
        self._sweep = fp8_scale_sweep
        count = math.ceil((stop_multiplier - start_multiplier) / step_size) + 1
        self._multipliers = torch.linspace(start_multiplier, stop_multiplier, count).tolist()

    def problem(self, fmt: LinearFormat) -> str | None:
        """See `Algorithm`."""
        if self._sweep:
            return sweep_problem(fmt)
        if fmt.codec.takes_scale_amax:
            return None
        return "its scales follow from the largest magnitudes, whatever the error"

    def reads(self, fmt: LinearFormat) -> int:
        """See `Algorithm`."""
        return 2

    def choose(self, weights: Sequence[Weight], each: Each = here) -> Choices:
        """See `Algorithm`."""
        shared = shared_amax(weights)
        choices = {}
        for weight in weights:
            w_RK, amax = weight.read(), shared[weight.together]
            if self._sweep:
                scale_2 = nvfp4.weight_scale_2(amax, numerics=self.numerics)
                scale_RB = best_block_scales(w_RK, scale_2)
                chosen = amax_of_scales(scale_RB, amax)
            else:
                chosen = best_multiples(
                    w_RK, amax, weight.format.codec, self._multipliers, self.numerics
                )
            choices[weight.key] = Choice(scale_amax=chosen)
        return choices


def shared_amax(weights: Sequence[Weight]) -> dict[str, Tensor]:
    """Return the largest magnitude of matrices that share a scale, float32 [], by ``together``."""
    shared: dict[str, Tensor] = {}
    for weight in weights:
        own = base.amax(weight.read())
        shared[weight.together] = torch.maximum(shared.get(weight.together, own), own)
    return shared


def amax_of_scales(scale_RB: Tensor, amax: Tensor) -> Tensor:
    """Return the largest magnitudes that E4M3 block scales stand for, float32 [R, B]."""
    return scale_RB.float() * (amax / E4M3_MAX)


def best_multiples(
    w_RK: Tensor,
    amax: Tensor,
    codec: Codec,
    multipliers: Sequence[float],
    numerics: Numerics,
) -> Tensor:
    """Return the best multiple of what each scale stands for; the first of those that lose least.

    Args:
        w_RK: A matrix.
        amax: float32 [], its group's largest magnitude.
        codec: INT8, INT4 or NVFP4.
        multipliers: What to try.
        numerics: ``modelopt`` rounds NVFP4's scales as Model Optimizer's search does.
    """
    chosen = []
    for rows in row_chunks(w_RK, codec.row_multiple):
        part_RK = w_RK[rows]
        own = codec.scale_amax(part_RK)
        best = torch.full_like(own, torch.inf)
        taken = own.clone()
        for multiplier in multipliers:
            tried = own * multiplier
            error_RK = _rounded(part_RK, amax, codec, tried, numerics).sub_(part_RK)
            loss = error_RK.square_().view(*own.shape, -1).sum(-1)
            taken = torch.where(loss < best, tried, taken)
            best = torch.minimum(loss, best)
        chosen.append(taken)
    return torch.cat(chosen)


def _rounded(
    w_RK: Tensor, amax: Tensor, codec: Codec, scale_amax: Tensor, numerics: Numerics
) -> Tensor:
    """Return rounded weights, float32."""
    if numerics == "modelopt" and codec.kind == "float":
        step = static_steps(scale_amax, amax, codec.scale_limit)
        w_NS = w_RK.float().reshape(step.numel(), -1)
        return round_to_steps(w_NS, step.view(-1, 1)).view(w_RK.shape)
    kept = codec.quantize(w_RK, amax, numerics="exact", scale_amax=scale_amax)
    return codec.dequantize(kept, torch.float32)
