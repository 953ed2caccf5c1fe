"""MXFP4 as gpt-oss publishes it: 4-bit E2M1 elements, a power of two for each 32 of them.

A value is ``element * 2**(scale - 127)``. On disk a matrix of an expert lies with its output
channels as rows; the model's parameter is the transpose. Reading only.

Shape letters: E experts, R rows (out), G groups of 32 columns (in).

Source: OCP Microscaling Formats v1.0, sections 5.3.3 (E2M1) and 5.4.1 (E8M0).
"""

from __future__ import annotations

import torch
from torch import Tensor

from modelopt_lite.errors import ShapeError
from modelopt_lite.formats import e2m1
from modelopt_lite.formats.base import row_chunks

BLOCK = 32
_NAN_SCALE = 255
_SCALE_BIAS = 127


def dequantize(
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


def _exponent(scale: Tensor) -> Tensor:
    """Return the exponents of E8M0 bytes with a trailing axis, float32; NaN for the byte 255."""
    exponent = scale.float().unsqueeze(-1)
    return torch.where(exponent == _NAN_SCALE, torch.nan, exponent - _SCALE_BIAS)
