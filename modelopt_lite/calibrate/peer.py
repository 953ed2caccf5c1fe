"""How Model Optimizer 0.47 simulates rounded weights while it searches.

The simulation is not what it exports: products by inverse scales, results in the weights' dtype.
Its choices follow from it, so ``numerics="modelopt"`` needs the same.

Shape suffixes: R rows, K columns, N blocks, S elements of a block.
"""

from __future__ import annotations

import torch
from torch import Tensor

from modelopt_lite.errors import InternalError
from modelopt_lite.formats import e2m1, fp8, nvfp4
from modelopt_lite.formats.base import E2M1_MAX, E4M3_MAX
from modelopt_lite.formats.linear import LinearFormat

# Block scales under this count as one.
_SMALLEST_STEP = 1e-5
_SMALLEST_INTEGER_AMAX = 2.0**-24


def fake_quantize_as_peer(w_RK: Tensor, fmt: LinearFormat, amax: Tensor | None = None) -> Tensor:
    """Return rounded weights in their own dtype.

    Args:
        w_RK: bfloat16, float16 or float32.
        fmt: INT4 or NVFP4 weights.
        amax: Largest magnitude that a value may have: of each block (INT4), of the matrix (NVFP4).
            None takes those of ``w_RK``.
    """
    block = fmt.group_size
    if block is None:
        raise InternalError(f"the peer's searches need blocks, {fmt.name} has none")
    w_NS = w_RK.contiguous().view(-1, block)
    if fmt.codec.kind == "int":
        rounded = _integers(w_NS, w_NS.abs().amax(1, keepdim=True) if amax is None else amax)
    else:
        rounded = _e2m1(w_NS, w_RK.abs().amax() if amax is None else amax)
    return rounded.view(w_RK.shape).to(w_RK.dtype)


def _integers(w_NS: Tensor, amax_N1: Tensor) -> Tensor:
    amax_N1 = amax_N1.float().view(-1, 1)
    nothing = amax_N1 <= _SMALLEST_INTEGER_AMAX
    # A number over a tensor would be its reciprocal times the number, which rounds twice.
    factor = torch.where(nothing, 0.0, torch.full_like(amax_N1, 7.0) / amax_N1)
    code_NS = (w_NS.float() * factor).round_().clamp_(-8.0, 7.0)
    return code_NS / torch.where(nothing, 1.0, factor)


def peer_problem(fmt: LinearFormat) -> str | None:
    """Return why Model Optimizer's simulation does not know a format, None if it does."""
    codec = fmt.codec
    integers = codec.kind == "int" and codec.block is not None
    if codec.takes_scale_amax and (integers or codec.block == nvfp4.BLOCK):
        return None
    return 'numerics="modelopt" searches in INT4 and NVFP4 alone'


def integer_factor(amax: Tensor, largest: float, *, exact: bool) -> Tensor:
    """Return by what float32 values are multiplied to become codes; 0 is no magnitude.

    The inverse of the scale that is exported, or what Model Optimizer multiplies by.
    """
    amax = torch.where(amax > 0, amax, largest)
    return (amax / largest).reciprocal() if exact else torch.full_like(amax, largest) / amax


def _e2m1(w_NS: Tensor, amax: Tensor) -> Tensor:
    scale_2 = amax.float() / (E2M1_MAX * E4M3_MAX)
    w_NS = w_NS.float()
    scale_N1 = w_NS.abs().amax(1, keepdim=True) / (E2M1_MAX * scale_2)
    step_N1 = scale_N1.clamp(max=E4M3_MAX).to(fp8.DTYPE).float() * scale_2
    return round_to_steps(w_NS, torch.where(step_N1 < _SMALLEST_STEP, 1.0, step_N1))


def round_to_steps(w_NS: Tensor, step_N1: Tensor) -> Tensor:
    """Return E2M1 multiples of positive steps nearest to float32 values, past 6 steps clipped."""
    size = (w_NS.abs() / step_N1).contiguous()
    code = e2m1.round_(size, torch.empty_like(size), torch.empty_like(size)) & 7
    magnitudes = torch.tensor(e2m1.MAGNITUDES, device=w_NS.device)
    rounded = torch.index_select(magnitudes, 0, code.view(-1)).view(w_NS.shape)
    return torch.copysign(rounded * step_N1, w_NS)


def static_steps(scale_amax: Tensor, amax: Tensor, limit: float) -> Tensor:
    """Return the step of each block while scales are searched, which export may round otherwise.

    Args:
        scale_amax: float32, what a block's code of 6 stands for.
        amax: float32 [], the largest magnitude of all matrices that share a scale.
        limit: The block scale of a block that reaches it.
    """
    factor = E4M3_MAX / (amax * (E4M3_MAX / limit) / E2M1_MAX)
    step = (scale_amax / E2M1_MAX * factor).to(fp8.DTYPE).float() * factor.reciprocal()
    return torch.where(step < _SMALLEST_STEP, 1.0, step)
