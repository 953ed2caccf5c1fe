"""What algorithms share that scale the input channels of weights.

Inputs are multiplied by ``pre_quant_scale`` and the columns of weights divided by it, so that a
product stays the same. All matrices that read one tensor share one scale.

Shape suffixes: R rows (output channels), K columns (input channels).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from modelopt_lite.calibrate.algorithm import Choice, Choices, Each, Step, Weight, here

MIN_SCALE = 1e-4
MAX_SCALE = 1e4


def shared_choices(weights: Sequence[Weight], scale_K: Tensor, each: Each = here) -> Choices:
    """Smooth all matrices by one scale, each rounded once.

    Args:
        weights: What reads the tensor.
        scale_K: float32 [K] > 0; rounded to the dtype of the weights, and then used as it is.
        each: See `Algorithm`.
    """
    [dtype] = each(weights[:1], lambda weight: weight.read().dtype)
    scale_K = scale_K.to(dtype)

    def smooth(w_RK: Tensor) -> Tensor:
        return (w_RK.float() / scale_K.float()).to(dtype)

    return {
        weight.key: Choice(scale_K, (smooth,), _smoothed_amax(weight, scale_K.float()))
        for weight in weights
    }


def averaged_choices(weights: Sequence[Weight], scales: Sequence[Tensor]) -> Choices:
    """Smooth each matrix by a scale of its own, then by means, as Model Optimizer does.

    By the mean over all experts of a projection, then by the mean over the projections; what does
    not change is not rounded again. The amax of inputs stays what a matrix's own scale made of it.

    Args:
        weights: What reads the tensor.
        scales: float32 [K] > 0, one for each.
    """
    dtype = weights[0].read().dtype
    by_role: dict[str, list[Tensor]] = {}
    for weight, scale_K in zip(weights, scales, strict=True):
        by_role.setdefault(weight.role, []).append(scale_K.to(dtype))
    role_mean = {role: torch.mean(torch.stack(own), dim=0) for role, own in by_role.items()}
    mean_K = torch.mean(torch.stack(list(role_mean.values())), dim=0)
    choices = {}
    for weight, scale_K in zip(weights, scales, strict=True):
        steps = [_smoothing(1.0 / scale_K)]
        before_K = scale_K.to(dtype)
        for after_K in (role_mean[weight.role], mean_K):
            if not torch.equal(before_K, after_K):
                steps.append(_smoothing_again(before_K, after_K))
            before_K = after_K
        amax = _smoothed_amax(weight, scale_K)
        amax = None if amax is None else amax.to(dtype)
        own_K = scale_K.to(dtype)
        choices[weight.key] = Choice(mean_K, tuple(steps), amax, own_scale=own_K)
    return choices


def _smoothing(factor_K: Tensor) -> Step:
    return lambda w_RK: (w_RK * factor_K).to(w_RK.dtype)


def _smoothing_again(own_K: Tensor, other_K: Tensor) -> Step:
    return lambda w_RK: (w_RK.float() * own_K.float() / other_K.float()).to(w_RK.dtype)


def _smoothed_amax(weight: Weight, scale_K: Tensor) -> Tensor | None:
    """Return the largest magnitude of the scaled inputs, float32 [], None where none was seen."""
    return None if weight.amax is None else (weight.amax * scale_K).amax().float()
