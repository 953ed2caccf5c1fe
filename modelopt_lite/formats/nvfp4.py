"""NVFP4: 4-bit E2M1 elements, an E4M3 scale for 16 elements, a float32 scale for the tensor.

A value is ``element * scale * scale_2``; cost 4 + 8/16 = 4.5 bits an element. Blocks run along the
input channels; two elements share a byte, the even column in the low nibble. The same with blocks
of 32 is what the peer's W4A8_NVFP4_FP8 keeps.

Shape suffixes: R rows, K columns, P = K / 2 bytes, B = K / block blocks in a row, N blocks in all;
a leading E (experts) is allowed where a docstring says so.

Sources: OCP Microscaling Formats v1.0 (E2M1); NVIDIA, arXiv:2509.25149 (the two scales).
"""

from __future__ import annotations

import torch
from torch import Tensor

from modelopt_lite.errors import ShapeError
from modelopt_lite.formats import base, e2m1, fp8
from modelopt_lite.formats.base import (
    E2M1_MAX,
    E4M3_ABSOLUTE_ERROR,
    E4M3_MAX,
    E4M3_MIN_NORMAL,
    E4M3_MIN_SUBNORMAL,
    F32_SLACK,
    Numerics,
    block_amax,
    chunk_rows,
    row_chunks,
    sanitized_amax,
)
from modelopt_lite.formats.e2m1 import pack, unpack

__all__ = [
    "BLOCK",
    "dequantize",
    "error_bound",
    "fake_quantize",
    "pack",
    "quantize",
    "unpack",
    "weight_scale_2",
]

BLOCK = 16
DIVISOR = "weight_global_scale"
"""Name of one over ``scale_2``, where that is what was stored: it is divided by."""

# The smallest block scale, 2**-9, times this is the smallest normal float32.
_MIN_SCALE_2 = 2.0**-117

# A block's scale rounds up by at most 1/17 of itself: 18/17 * amax / 6, times the widest half step
# of E2M1, 1, between 4 and 6. Rounded down it clips by amax / 17 at most, which is less.
_BLOCK_RELATIVE_ERROR = 3 / 17


def weight_scale_2(
    amax: Tensor, *, numerics: Numerics = "exact", reach: float = E2M1_MAX * E4M3_MAX
) -> Tensor:
    """Return the tensor's scale, ``amax / reach``, float32 of the shape of ``amax``.

    Args:
        amax: The largest magnitude of all matrices that share the scale; 0 and NaN count as 6.
        numerics: ``exact`` keeps the scale at 2**-117 or more, so that no step (block scale times
            this) is subnormal.
        reach: Largest value of element times block scale.
    """
    scale = sanitized_amax(amax, E2M1_MAX) / reach
    return scale.clamp_min(_MIN_SCALE_2) if numerics == "exact" else scale


def chosen_scales(scale_amax: Tensor, amax: Tensor, limit: float = E4M3_MAX) -> Tensor:
    """Return the block scales for chosen magnitudes, float8_e4m3fn of their shape.

    Args:
        scale_amax: float32 [R, B] or [E, R, B], the magnitude that the code of 6 shall stand for.
        amax: The largest magnitude of all matrices that share ``weight_scale_2``.
        limit: The block scale of a block that reaches it.
    """
    scale = scale_amax / E2M1_MAX
    scale = torch.where(scale > 0, scale, 1.0) * (
        limit / (sanitized_amax(amax, E2M1_MAX) / E2M1_MAX)
    )
    return scale.clamp_(E4M3_MIN_SUBNORMAL, E4M3_MAX).to(fp8.DTYPE)


def quantize(
    w_RK: Tensor, scale_2: Tensor, block: int = BLOCK, chosen: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Round a matrix to NVFP4, to nearest, ties to the even code.

    Args:
        w_RK: [R, K] or [E, R, K], bfloat16, float16 or float32, finite, K a multiple of ``block``.
            Read, never written; any strides.
        scale_2: float32 [] > 0, ``weight_scale_2`` of an amax that covers ``w_RK``.
        block: Elements that share a scale.
        chosen: The block scales; None takes those that fit the blocks. With others values past 6
            steps are clipped, and the error is within ``clipping_bound``.

    Returns:
        uint8 [R, P] and float8_e4m3fn [R, B] (or with E before), within ``error_bound``. Block
        scales lie in [2**-9, 448]; a block of zeros has the scale 1. Zeros of either sign get code
        0, negatives that round to zero code 8.

    Raises:
        ShapeError: K is not a multiple of ``block``, or the tensor is not 2-D or 3-D.
    """
    _check_blocks(w_RK, block)
    columns = w_RK.shape[-1]
    packed = w_RK.new_empty((*w_RK.shape[:-1], columns // 2), dtype=torch.uint8)
    scale = w_RK.new_empty((*w_RK.shape[:-1], columns // block), dtype=torch.float8_e4m3fn)
    if chosen is not None:
        scale.copy_(chosen)
    if w_RK.ndim == 2:
        matrices = [(w_RK, packed, scale)]
    elif w_RK.ndim == 3:
        matrices = list(zip(w_RK, packed, scale, strict=True))
    else:
        raise ShapeError(f"NVFP4 needs [R, K] or [E, R, K], got {list(w_RK.shape)}")

    chunk = min(chunk_rows(columns, w_RK.device), w_RK.shape[-2]) * columns
    scratch = base.scratch(4, chunk, w_RK.device)
    for matrix_RK, packed_RP, scale_RB in matrices:
        for rows in row_chunks(matrix_RK):
            _quantize_chunk(
                matrix_RK[rows],
                scale_2,
                packed_RP[rows],
                scale_RB[rows],
                scratch,
                block,
                fits=chosen is None,
            )
    return packed, scale


def dequantize(
    packed_RP: Tensor,
    scale_RB: Tensor,
    scale_2: Tensor,
    dtype: torch.dtype = torch.float32,
    block: int = BLOCK,
    divisor: Tensor | None = None,
) -> Tensor:
    """Return the [R, K] (or [E, R, K]) values that the bytes stand for.

    They are ``element * (scale * scale_2)``, products in float32, rounded once to ``dtype``.

    Args:
        packed_RP: uint8 [R, P] or [E, R, P].
        scale_RB: float8_e4m3fn [R, B] or [E, R, B].
        scale_2: float32 [].
        dtype: Of the result.
        block: Elements that share a scale.
        divisor: float32 [], divides ``scale`` instead of the product with ``scale_2``.
    """
    out = packed_RP.new_empty((*packed_RP.shape[:-1], packed_RP.shape[-1] * 2), dtype=dtype)
    if not out.numel():
        return out
    packed_NP = packed_RP.reshape(-1, block // 2)
    scale_N1 = scale_RB.reshape(-1, 1)
    out_NK = out.view(-1, block)
    for part in row_chunks(out_NK):
        step_N1 = fp8.decode(scale_N1[part])
        step_N1 = step_N1.mul_(scale_2) if divisor is None else step_N1.div_(divisor)
        value_NK = e2m1.decode(packed_NP[part])
        if dtype == torch.float32:
            torch.mul(value_NK, step_N1, out=out_NK[part])
        else:
            out_NK[part].copy_(value_NK.mul_(step_N1))
    return out


def error_bound(w_RK: Tensor, scale_2: Tensor, block: int = BLOCK) -> Tensor:
    """Return the largest ``|dequantize(quantize(w)) - w|`` of each element, float32, shape of w.

    It is the smaller of ``|w|`` and a bound that a block shares: ``3/17 * amax(block)`` where the
    block's scale is a normal E4M3 number (``amax(block) >= 2**-6 * 6 * scale_2``); in smaller
    blocks, whose scale is rounded by up to 2**-10,
    ``max(amax(block) / 6 + 2**-10 * scale_2, 6 * 2**-10 * scale_2)``. It stops holding where a
    block exceeds ``6 * 448 * scale_2``, and where ``scale_2`` is so near the end of float32 that it
    lost bits (amax under 2**-100, with ``numerics="modelopt"`` only).
    """
    _check_blocks(w_RK, block)
    size = w_RK.abs() if w_RK.dtype == torch.float32 else w_RK.float().abs_()
    size = size.contiguous().view(-1)
    amax_N = block_amax(size, block)
    rounding = scale_2 * E4M3_ABSOLUTE_ERROR
    small_N = torch.maximum(amax_N / E2M1_MAX + rounding, rounding * E2M1_MAX)
    normal_N = amax_N >= scale_2 * (E2M1_MAX * E4M3_MIN_NORMAL)
    bound_N = torch.where(normal_N, amax_N * _BLOCK_RELATIVE_ERROR, small_N)
    size_NK = size.view(-1, block)
    bound = torch.minimum(size_NK, bound_N.unsqueeze(-1), out=size_NK)
    return bound.mul_(F32_SLACK).view(w_RK.shape)


def clipping_bound(w_RK: Tensor, scale_RB: Tensor, scale_2: Tensor, block: int = BLOCK) -> Tensor:
    """Return the largest error of each element under any block scales, float32, shape of w.

    It is a step, half of the widest distance of two elements, or what lies past 6 steps; never more
    than ``|w|``.
    """
    step = (scale_RB.float() * scale_2).repeat_interleave(block, dim=-1)
    size = w_RK.float().abs()
    return torch.minimum(size, (size - step * E2M1_MAX).clamp_min(step)).mul_(F32_SLACK)


def fake_quantize(x: Tensor, input_scale: Tensor) -> Tensor:
    """Return ``x`` rounded as an engine's NVFP4 kernel sees it, in the dtype of ``x``.

    A block's scale comes from the block and is rounded to E4M3 under the static global scale; a
    block whose scale rounds to 0 becomes 0.

    Args:
        x: Activations [..., K], K a multiple of 16.
        input_scale: float32 [] = amax / (6 * 448) of the calibration.

    Raises:
        ShapeError: K is not a multiple of 16.
    """
    _check_blocks(x, BLOCK)
    value = x.float().contiguous()
    size = value.abs().view(-1)
    scale_N = (block_amax(size, BLOCK) / (input_scale * E2M1_MAX)).clamp_(max=E4M3_MAX)
    step_N1 = (scale_N.to(fp8.DTYPE).float() * input_scale).unsqueeze(-1)
    size.view(-1, BLOCK).div_(torch.where(step_N1 > 0, step_N1, torch.inf))
    code = e2m1.round_(size, torch.empty_like(size), torch.empty_like(size)) & 7
    magnitudes = torch.tensor(e2m1.MAGNITUDES, device=x.device)
    rounded_NK = torch.index_select(magnitudes, 0, code).view(-1, BLOCK).mul_(step_N1)
    return torch.copysign(rounded_NK.view(x.shape), value).to(x.dtype)


def _quantize_chunk(
    w_RK: Tensor,
    scale_2: Tensor,
    packed_RP: Tensor,
    scale_RB: Tensor,
    scratch: Tensor,
    block: int,
    *,
    fits: bool,
) -> None:
    """Quantize one chunk into ``packed_RP``; ``scratch`` is 4 float32 buffers.

    Block scales are found, where they shall fit the blocks, or taken from ``scale_RB``.
    """
    value, size, code, spare = scratch[:, : w_RK.numel()].unbind(0)
    value.view(w_RK.shape).copy_(w_RK)
    value.add_(0.0)  # -0.0 becomes 0.0, so that a sign bit means x < 0
    torch.abs(value, out=size)

    if fits:
        scale_N = block_amax(size, block) / (scale_2 * E2M1_MAX)
        scale_N = torch.where(scale_N > 0, scale_N, 1.0).clamp_(E4M3_MIN_SUBNORMAL, E4M3_MAX)
        scale_RB.copy_(scale_N.view(scale_RB.shape))
    step_N1 = (scale_RB.float() * scale_2).view(-1, 1)

    size.view(-1, block).div_(step_N1)
    magnitude = e2m1.round_(size, code, spare)
    packed_RP.copy_(e2m1.pack_signed(magnitude, value).view(packed_RP.shape))


def _check_blocks(w: Tensor, block: int) -> None:
    if w.ndim == 0 or w.shape[-1] % block:
        raise ShapeError(
            f"NVFP4 needs a last axis that is a multiple of {block}, got shape {list(w.shape)}; "
            "leave this module unquantized"
        )
