"""Block FP8: E4M3 codes, a float32 factor for each block of 128 x 128 elements.

A value is ``code * scale[row // 128, column // 128]``; the blocks at the right and bottom edge are
cut off where the matrix ends. DeepSeek-V3 publishes it so, and the modelopt dialect has it too.

Shape suffixes: R rows, K columns, G by H the grid of blocks.

Source: DeepSeek-V3 technical report, arXiv:2412.19437, section 3.3.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from modelopt_lite.errors import ShapeError
from modelopt_lite.formats import base, fp8
from modelopt_lite.formats.base import Numerics

BLOCK = 128


def grid_shape(rows: int, columns: int, block: tuple[int, int] = (BLOCK, BLOCK)) -> tuple[int, int]:
    """Return how many blocks lie along rows and columns, those cut off at an edge included."""
    return -(-rows // block[0]), -(-columns // block[1])


def block_amax(w_RK: Tensor) -> Tensor:
    """Return the largest magnitude of each block of 128 x 128, float32 [G, H]; NaN stays."""
    rows, columns = w_RK.shape
    amax_GH = w_RK.new_empty(grid_shape(rows, columns), dtype=torch.float32)
    padding = (0, -columns % BLOCK)
    for amax_H, band in zip(amax_GH, _bands(rows), strict=True):
        amax_K = base.amax_along(w_RK[band], 0)
        amax_H.copy_(torch.nn.functional.pad(amax_K, padding).view(-1, BLOCK).amax(-1))
    return amax_GH


def quantize(w_RK: Tensor, scale_GH: Tensor, *, numerics: Numerics) -> Tensor:
    """Round ``w / scale`` to E4M3, to nearest, ties to even, past 448 clamped.

    Args:
        w_RK: [R, K], bfloat16, float16 or float32, finite. Read, never written; any strides.
        scale_GH: float32 [G, H] > 0, ``fp8.scale_from_amax`` of ``block_amax``.
        numerics: Both give the same; quotients are float32.

    Returns:
        float8_e4m3fn [R, K], within ``error_bound``.

    Raises:
        ShapeError: ``scale_GH`` has another shape than the blocks ask for.
    """
    _check(w_RK, scale_GH, (BLOCK, BLOCK))
    codes = torch.empty_like(w_RK, dtype=fp8.DTYPE)
    for scale_H, band in zip(scale_GH, _bands(w_RK.shape[0]), strict=True):
        scale_1K = _widened(scale_H, w_RK.shape[1])
        fp8.quantize(w_RK[band], scale_1K, numerics=numerics, out=codes[band])
    return codes


def dequantize(
    codes_RK: Tensor,
    scale_GH: Tensor,
    block: tuple[int, int] = (BLOCK, BLOCK),
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Return the [R, K] values, multiplied in float32 and rounded once to ``dtype``.

    Args:
        codes_RK: float8_e4m3fn [R, K]. NaN codes stay NaN.
        scale_GH: [ceil(R / rows of a block), ceil(K / columns of a block)], any float dtype.
        block: Rows and columns of a block.
        dtype: Of the result.

    Raises:
        ShapeError: ``scale_GH`` has another shape than the blocks ask for.
    """
    _check(codes_RK, scale_GH, block)
    out = torch.empty(codes_RK.shape, dtype=dtype, device=codes_RK.device)
    for scale_H, band in zip(scale_GH.float(), _bands(len(codes_RK), block[0]), strict=True):
        scale_1K = _widened(scale_H, codes_RK.shape[1], block[1])
        for rows in base.row_chunks(codes_RK[band]):
            fp8.multiply(codes_RK[band][rows], scale_1K, out[band][rows])
    return out


def error_bound(w_RK: Tensor, scale_GH: Tensor) -> Tensor:
    """Return the largest ``|dequantize(quantize(w)) - w|`` of each element, float32 [R, K].

    That of ``fp8.error_bound`` with the scale of the element's block; it stops holding where a
    block exceeds 448 times its scale.
    """
    _check(w_RK, scale_GH, (BLOCK, BLOCK))
    if len(scale_GH) == 1:
        scale_1K = _widened(scale_GH[0], w_RK.shape[1])
        return fp8.error_bound(w_RK, scale_1K, numerics="exact")
    bound = torch.empty(w_RK.shape, dtype=torch.float32, device=w_RK.device)
    for scale_H, band in zip(scale_GH, _bands(w_RK.shape[0]), strict=True):
        scale_1K = _widened(scale_H, w_RK.shape[1])
        bound[band] = fp8.error_bound(w_RK[band], scale_1K, numerics="exact")
    return bound


def _bands(rows: int, height: int = BLOCK) -> Iterator[slice]:
    for start in range(0, rows, height):
        yield slice(start, min(start + height, rows))


def _widened(scale_H: Tensor, columns: int, width: int = BLOCK) -> Tensor:
    """Return the scales of a band of blocks for each column, [1, K]."""
    # A fraction of the time of `repeat_interleave`, which makes a table of indices first.
    return scale_H.unsqueeze(1).expand(-1, width).reshape(1, -1)[:, :columns]


def _check(t: Tensor, scale: Tensor, block: tuple[int, int]) -> None:
    if t.ndim != 2 or min(block) < 1:
        raise ShapeError(
            f"block FP8 needs a matrix and positive blocks, got shape {list(t.shape)} and "
            f"block {list(block)}; correct weight_block_size in the source's config.json"
        )
    expected = grid_shape(t.shape[0], t.shape[1], block)
    if tuple(scale.shape) != expected:
        raise ShapeError(
            f"a block FP8 matrix {list(t.shape)} in blocks of {list(block)} needs "
            f"scales of shape {list(expected)}, got {list(scale.shape)}; check "
            "weight_block_size in the source's config.json"
        )
