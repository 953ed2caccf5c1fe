"""MXFP8: E4M3 elements, a power of two (E8M0) for each 32 of them.

A value is ``element * 2**(scale - 127)``; cost 8 + 8/32 = 8.25 bits an element. Blocks run along
the input channels.

Shape suffixes: R rows, K columns, G = K / 32 groups in a row.

Source: OCP Microscaling Formats v1.0, sections 5.3.1 (E4M3) and 5.4.1 (E8M0).
"""

from __future__ import annotations

import torch
from torch import Tensor

from modelopt_lite.formats import e8m0, fp8
from modelopt_lite.formats.base import E4M3_MAX, Numerics, amax_along, chunk_rows, row_chunks
from modelopt_lite.formats.mxfp4 import BLOCK, check_blocks


def quantize(w_RK: Tensor, *, numerics: Numerics) -> tuple[Tensor, Tensor]:
    """Round a matrix to MXFP8, to nearest, ties to even.

    The scale of a block is the smallest power of two under which no element exceeds 448.

    Args:
        w_RK: [R, K], bfloat16, float16 or float32, finite, K a multiple of 32. Read, never written;
            any strides.
        numerics: See ``e8m0.scale_from_amax``.

    Returns:
        float8_e4m3fn [R, K] and uint8 [R, G], within ``error_bound``.

    Raises:
        ShapeError: Not a matrix, or K is not a multiple of 32.
    """
    check_blocks(w_RK)
    rows, columns = w_RK.shape
    codes = w_RK.new_empty((rows, columns), dtype=fp8.DTYPE)
    scale = w_RK.new_empty((rows, columns // BLOCK), dtype=torch.uint8)
    chunk = min(chunk_rows(columns, w_RK.device), rows) * columns
    scratch = torch.empty(chunk, dtype=torch.float32, device=w_RK.device)
    for part in row_chunks(w_RK):
        value = scratch[: w_RK[part].numel()].view(w_RK[part].shape).copy_(w_RK[part])
        amax_RG = amax_along(_blocks(w_RK[part]), -1)
        scale[part].copy_(e8m0.scale_from_amax(amax_RG, largest=E4M3_MAX, numerics=numerics))
        _blocks(value).mul_(e8m0.inverse(scale[part]).unsqueeze(-1))
        codes[part].copy_(value.clamp_(-E4M3_MAX, E4M3_MAX))
    return codes, scale


def dequantize(codes_RK: Tensor, scale_RG: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the values, exact in bfloat16 and float32 but at their ends."""
    out = codes_RK.new_empty(codes_RK.shape, dtype=dtype)
    for part in row_chunks(out):
        value = fp8.decode(codes_RK[part])
        _blocks(value).mul_(e8m0.decode(scale_RG[part]).unsqueeze(-1))
        out[part].copy_(value)
    return out


def error_bound(w_RK: Tensor, scale_RG: Tensor) -> Tensor:
    """Return the largest ``|dequantize(quantize(w)) - w|`` of each element, float32 [R, K].

    That of ``fp8.error_bound`` with the block's power of two for the scale.
    """
    step = e8m0.decode(scale_RG).repeat_interleave(BLOCK, dim=-1)
    return fp8.error_bound(w_RK, step, numerics="exact")


def fake_quantize(x: Tensor) -> Tensor:
    """Return activations [..., K] rounded to MXFP8 by their own scales, in the dtype of ``x``."""
    x_RK = x.reshape(-1, x.shape[-1])
    return dequantize(*quantize(x_RK, numerics="exact"), x.dtype).view(x.shape)


def _blocks(t_RK: Tensor) -> Tensor:
    blocks: Tensor = t_RK.unflatten(-1, (-1, BLOCK))
    return blocks
