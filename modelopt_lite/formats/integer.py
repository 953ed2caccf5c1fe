"""INT8 and INT4: integers times a float32 scale, one for a row or for a group of its neighbours.

A value is ``code * scale``, the scale maps the largest magnitude to 127 or to 7; -128 and -8 are
reached only by values past it. Two INT4 codes of neighbouring rows share a byte, in two's
complement, the even row in the low nibble.

Shape suffixes: R rows, K columns, B groups in a row, P = R / 2 rows of bytes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from modelopt_lite.errors import ShapeError
from modelopt_lite.formats.base import (
    F32_TINY,
    Numerics,
    amax_along,
    chunk_rows,
    row_chunks,
    sanitized_amax,
    token_amax,
)

INT8_MAX = 127.0
INT4_MAX = 7.0
BLOCK = 128
"""Neighbours of an INT4 group, where nothing else is said."""

# 1.5 * 2**23 plus a float32 of at most 2**22 is rounded to an integer, ties to even, whose two's
# complement then is in the low bits of the sum.
_MAGIC = 1.5 * 2.0**23

# A quotient near 127 and its product are each off by up to 2**-18 and 2**-17 of a step.
_SLACK = 1 + 2.0**-15


def scale_from_amax(amax: Tensor, *, largest: float, numerics: Numerics = "exact") -> Tensor:
    """Return the scale that maps ``amax`` to the code ``largest``, float32 of the same shape.

    Args:
        amax: Any shape, any float dtype, >= 0. 0 and NaN give the scale 1.
        largest: 127 or 7.
        numerics: ``exact`` never goes below the smallest normal float32.
    """
    scale = (sanitized_amax(amax, largest).double() / largest).float()
    return scale.clamp_min(F32_TINY) if numerics == "exact" else scale


def int8_scale(amax: Tensor, *, numerics: Numerics = "exact") -> Tensor:
    """Return the scale that maps ``amax`` to 127; see ``scale_from_amax``."""
    return scale_from_amax(amax, largest=INT8_MAX, numerics=numerics)


def quantize_int8(w_RK: Tensor, scale_R: Tensor) -> Tensor:
    """Round ``w / scale`` to integers in -128 .. 127, to nearest, ties to even.

    Args:
        w_RK: [R, K], bfloat16, float16 or float32, finite. Read, never written; any strides.
        scale_R: float32 [R] > 0, ``scale_from_amax`` of ``row_amax``.

    Returns:
        int8 [R, K], within ``error_bound``.
    """
    codes = torch.empty_like(w_RK, dtype=torch.int8)
    scratch = _scratch(w_RK)
    for rows in row_chunks(w_RK):
        quotient = _filled(scratch, w_RK[rows]).div_(scale_R[rows].unsqueeze(-1))
        codes[rows].copy_(_rounded(quotient, INT8_MAX))  # keeps the low byte
    return codes


def dequantize_int8(
    codes_RK: Tensor, scale_R: Tensor, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Return ``codes * scale``, multiplied in float32, then rounded once to ``dtype``."""
    out = torch.empty_like(codes_RK, dtype=dtype)
    for rows in row_chunks(codes_RK):
        out[rows].copy_(codes_RK[rows].float().mul_(scale_R[rows].unsqueeze(-1)))
    return out


def block_amax(w_RK: Tensor, block: int = BLOCK) -> Tensor:
    """Return the largest magnitude of ``block`` neighbours in a row, float32 [R, B]; NaN stays.

    Raises:
        ShapeError: K is not a multiple of ``block``.
    """
    if w_RK.ndim != 2 or w_RK.shape[1] % block:
        raise _unfit(w_RK, f"a multiple of {block}")
    count = w_RK.shape[1] // block
    rows = [amax_along(_blocks(w_RK[part], count), -1) for part in row_chunks(w_RK)]
    return torch.cat(rows) if rows else w_RK.new_empty((0, count)).float()


def quantize_int4(w_RK: Tensor, scale_RB: Tensor) -> Tensor:
    """Round ``w / scale`` to integers in -8 .. 7, to nearest, ties to even; pack pairs of rows.

    Args:
        w_RK: [R, K], R even, K a multiple of B, bfloat16, float16 or float32, finite. Read, never
            written; any strides.
        scale_RB: float32 [R, B] > 0, ``scale_from_amax`` of ``block_amax``.

    Returns:
        uint8 [P, K], within ``error_bound``.

    Raises:
        ShapeError: R is odd, or K is not a multiple of B.
    """
    count = scale_RB.shape[-1]
    if w_RK.ndim != 2 or not count or w_RK.shape[1] % count:
        raise _unfit(w_RK, f"{count} groups of one size")
    if w_RK.shape[0] % 2:
        raise ShapeError(
            f"INT4 packs two rows in a byte, got {w_RK.shape[0]} rows; leave this module "
            "unquantized"
        )
    packed = w_RK.new_empty((w_RK.shape[0] // 2, w_RK.shape[1]), dtype=torch.uint8)
    scratch = _scratch(w_RK, 2)
    for rows in row_chunks(w_RK, 2):
        quotient = _filled(scratch, w_RK[rows])
        _blocks(quotient, count).div_(scale_RB[rows].unsqueeze(-1))
        even, odd = _rounded(quotient, INT4_MAX).view(-1, 2, w_RK.shape[1]).unbind(1)
        packed[_pairs(rows)].copy_((even & 15).bitwise_or_(odd << 4))  # keeps the low byte
    return packed


def dequantize_int4(
    packed_PK: Tensor, scale_RB: Tensor, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Return ``code * scale`` [R, K], multiplied in float32, then rounded once to ``dtype``."""
    codes_PK = packed_PK.view(torch.int8)
    out = packed_PK.new_empty((2 * len(packed_PK), packed_PK.shape[1]), dtype=dtype)
    for rows in row_chunks(out, 2):
        part = codes_PK[_pairs(rows)]
        value = torch.stack([(part << 4) >> 4, part >> 4], dim=1).float()
        _blocks(value.view(out[rows].shape), scale_RB.shape[-1]).mul_(scale_RB[rows].unsqueeze(-1))
        out[rows].copy_(value.view(out[rows].shape))
    return out


def error_bound(w: Tensor, scale: Tensor) -> Tensor:
    """Return the largest ``|dequantize(quantize(w)) - w|`` of each element, float32, shape of w.

    It is half of the scale, but never more than ``|w|``. It stops holding past the largest code:
    such elements are clipped.

    Args:
        w: Any shape.
        scale: float32, of a shape that broadcasts against ``w``.
    """
    return torch.minimum(w.float().abs(), scale * 0.5).mul_(_SLACK)


def clipping_bound(w: Tensor, scale: Tensor, largest: float) -> Tensor:
    """Return the largest error of each element under any scale, float32, shape of w.

    It is half of the scale, or what lies past ``largest`` times the scale; never more than ``|w|``.
    """
    size = w.float().abs()
    past = (size - scale * largest).clamp_min(scale * 0.5)
    return torch.minimum(size, past).mul_(_SLACK)


def fake_quantize_int8(x: Tensor, scale: Tensor) -> Tensor:
    """Return ``x`` rounded as an engine's INT8 kernel sees it, in the dtype of ``x``.

    Args:
        x: Activations of any shape.
        scale: float32, of a shape that broadcasts against ``x``: [] = amax / 127 of the
            calibration, or [..., 1] of each token; larger magnitudes are clipped.
    """
    quotient = (x.float() / scale).round_().clamp_(-INT8_MAX - 1, INT8_MAX)
    return quotient.mul_(scale).to(x.dtype)


def fake_quantize_int8_per_token(x: Tensor) -> Tensor:
    """Return ``x`` [..., K] rounded to INT8 with a scale of its own for each token."""
    return fake_quantize_int8(x, int8_scale(token_amax(x)))


def _scratch(w_RK: Tensor, multiple: int = 1) -> Tensor:
    """Return room for the largest chunk of ``row_chunks`` as float32."""
    rows = min(max(multiple, chunk_rows(w_RK.shape[1], w_RK.device)), w_RK.shape[0])
    return torch.empty(rows * w_RK.shape[1], dtype=torch.float32, device=w_RK.device)


def _filled(scratch: Tensor, part_RK: Tensor) -> Tensor:
    """Return some rows as float32, in scratch memory."""
    return scratch[: part_RK.numel()].view(part_RK.shape).copy_(part_RK)


def _blocks(t_RK: Tensor, count: int) -> Tensor:
    blocks: Tensor = t_RK.unflatten(-1, (count, -1))
    return blocks


def _pairs(rows: slice) -> slice:
    return slice(rows.start // 2, rows.stop // 2)


def _unfit(w_RK: Tensor, wanted: str) -> ShapeError:
    return ShapeError(
        f"INT4 needs a matrix whose columns are {wanted}, got shape {list(w_RK.shape)}; take "
        "another group_size, or leave this module unquantized"
    )


def _rounded(quotient: Tensor, largest: float) -> Tensor:
    """Return clamped and rounded quotients in the low bits of int32; overwrites ``quotient``."""
    return quotient.clamp_(-largest - 1, largest).add_(_MAGIC).view(torch.int32)
