"""MXFP4: 4-bit E2M1 elements, a power of two (E8M0) for each 32 of them.

A value is ``element * 2**(scale - 127)``; cost 4 + 8/32 = 4.25 bits an element. Blocks run along
the input channels; two elements share a byte, the even column in the low nibble. gpt-oss publishes
it in groups, [..., R, G, 16] bytes, which ``dequantize_groups`` reads.

Shape letters: E experts, R rows (out), K columns (in), G = K / 32 groups, P = K / 2 bytes in a row.

Source: OCP Microscaling Formats v1.0, sections 5.3.3 (E2M1) and 5.4.1 (E8M0).
"""

from __future__ import annotations

import torch
from torch import Tensor

from modelopt_lite.errors import ShapeError
from modelopt_lite.formats import base, e2m1, e8m0
from modelopt_lite.formats.base import E2M1_MAX, Numerics, block_amax, chunk_rows, row_chunks

BLOCK = 32


def quantize(w_RK: Tensor, *, numerics: Numerics) -> tuple[Tensor, Tensor]:
    """Round a matrix to MXFP4.

    The scale of a block is the smallest power of two under which no element exceeds 6.

    Args:
        w_RK: [R, K], bfloat16, float16 or float32, finite, K a multiple of 32. Read, never written;
            any strides.
        numerics: ``exact`` rounds to nearest, ties to the even code; zeros get code 0, negatives
            that round to zero code 8. ``modelopt`` rounds ties toward zero; zeros get code 8.

    Returns:
        uint8 [R, P] and uint8 [R, G], within ``error_bound``.

    Raises:
        ShapeError: Not a matrix, or K is not a multiple of 32.
    """
    check_blocks(w_RK)
    rows, columns = w_RK.shape
    packed = w_RK.new_empty((rows, columns // 2), dtype=torch.uint8)
    scale = w_RK.new_empty((rows, columns // BLOCK), dtype=torch.uint8)
    chunk = min(chunk_rows(columns, w_RK.device), rows) * columns
    scratch = base.scratch(4, chunk, w_RK.device)
    for part in row_chunks(w_RK):
        _quantize_chunk(w_RK[part], packed[part], scale[part], scratch, numerics)
    return packed, scale


def dequantize(packed_RP: Tensor, scale_RG: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the [R, K] values of bytes, exact in bfloat16 and float32 but at their ends."""
    out = packed_RP.new_empty((packed_RP.shape[0], 2 * packed_RP.shape[1]), dtype=dtype)
    for part in row_chunks(out):
        value = e2m1.decode(packed_RP[part])
        value.view(-1, BLOCK).mul_(e8m0.decode(scale_RG[part]).reshape(-1, 1))
        out[part].copy_(value)
    return out


def error_bound(w_RK: Tensor, scale_RG: Tensor) -> Tensor:
    """Return the largest ``|dequantize(quantize(w)) - w|`` of each element, float32 [R, K].

    Half of the distance of the two elements around it: 1/4, 1/2 or 1 of the block's power of two,
    where ``|w|`` is at most 2, 4 or 6 times that; but never more than ``|w|``. It is at most
    ``amax(block) / 5`` unless the block's amax is below ``6 * 2**-127``.
    """
    size = w_RK.float().abs()
    step = e8m0.decode(scale_RG).repeat_interleave(BLOCK, dim=-1)
    half = torch.where(size > 2 * step, 0.5, 0.25)
    half = torch.where(size > 4 * step, 1.0, half)
    return torch.minimum(size, half.mul_(step))


def fake_quantize(x: Tensor) -> Tensor:
    """Return activations [..., K] rounded to MXFP4 by their own scales, in the dtype of ``x``."""
    x_RK = x.reshape(-1, x.shape[-1])
    return dequantize(*quantize(x_RK, numerics="exact"), x.dtype).view(x.shape)


def dequantize_groups(
    blocks: Tensor, scales: Tensor, dtype: torch.dtype = torch.float32, *, input_major: bool = False
) -> Tensor:
    """Return the values of packed groups, exact in bfloat16 and float32 but at their ends.

    Args:
        blocks: uint8 [..., R, G, 16], the even column in the low nibble.
        scales: uint8 [..., R, G], exponent plus 127. 255 stands for NaN and makes its group NaN,
            which the caller's check for finite weights finds.
        dtype: Of the result.
        input_major: Return the transpose, the layout of the model's parameter.

    Returns:
        [..., R, 32 G], or [..., 32 G, R] with ``input_major``; contiguous.

    Raises:
        ShapeError: The shapes do not belong together.
    """
    if blocks.ndim < 3 or blocks.shape[-1] != BLOCK // 2 or blocks.shape[:-1] != scales.shape:
        raise ShapeError(
            f"MXFP4 needs blocks [..., rows, groups, 16] and scales [..., rows, groups], got "
            f"{list(blocks.shape)} and {list(scales.shape)}; the source's *_blocks and *_scales do "
            "not belong together"
        )
    *lead, rows, groups, _ = blocks.shape
    shape = (*lead, groups * BLOCK, rows) if input_major else (*lead, rows, groups * BLOCK)
    out = torch.empty(shape, dtype=dtype, device=blocks.device)
    if not out.numel():
        return out
    as_rows = out.transpose(-1, -2) if input_major else out
    matrices = as_rows.reshape(-1, rows, groups * BLOCK)  # a view: the leading axes are whole
    for out_RK, packed, scale in zip(
        matrices, blocks.view(-1, rows, groups, 16), scales.view(-1, rows, groups), strict=True
    ):
        for part in row_chunks(out_RK):
            value = torch.ldexp(e2m1.decode(packed[part]), _exponent(scale[part]))
            out_RK[part].copy_(value.flatten(1))
    return out


def check_blocks(w: Tensor) -> None:
    """Raise `ShapeError` where a tensor is no matrix of whole blocks of 32."""
    if w.ndim != 2 or w.shape[-1] % BLOCK:
        raise ShapeError(
            f"MX formats need a matrix whose columns are a multiple of {BLOCK}, got shape "
            f"{list(w.shape)}; leave this module unquantized"
        )


def _quantize_chunk(
    w_RK: Tensor, packed_RP: Tensor, scale_RG: Tensor, scratch: Tensor, numerics: Numerics
) -> None:
    """Quantize one chunk into ``packed_RP`` and ``scale_RG``; ``scratch`` is 4 float32 buffers."""
    value, size, code, spare = scratch[:, : w_RK.numel()].unbind(0)
    value.view(w_RK.shape).copy_(w_RK)
    torch.abs(value, out=size)
    scale_N = e8m0.scale_from_amax(block_amax(size, BLOCK), largest=E2M1_MAX, numerics=numerics)
    scale_RG.copy_(scale_N.view(scale_RG.shape))
    size.view(-1, BLOCK).mul_(e8m0.inverse(scale_N).view(-1, 1))
    value.add_(0.0)  # -0.0 becomes 0.0, so that a sign bit means x < 0
    if numerics == "exact":
        magnitude = e2m1.round_(size, code, spare)
    else:
        value.view(torch.int32).sub_(1)  # the bits of 0.0 become negative: it means x <= 0
        magnitude = e2m1.round_down_(size, code, spare)
    packed_RP.copy_(e2m1.pack_signed(magnitude, value).view(packed_RP.shape))


def _exponent(scale: Tensor) -> Tensor:
    """Return the exponents of E8M0 bytes with a trailing axis, float32; NaN for the byte 255."""
    exponent = scale.float().unsqueeze(-1)
    return torch.where(exponent == e8m0.NAN, torch.nan, exponent - e8m0.BIAS)
