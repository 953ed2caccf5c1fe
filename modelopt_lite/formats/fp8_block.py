"""Block FP8 as DeepSeek-V3 publishes it: E4M3 codes, a float32 factor for each 128 x 128 block.

A value is ``code * scale_inv[row // 128, column // 128]``; the blocks at the right and bottom edge
are cut off where the matrix ends. Reading only.

Shape suffixes: R rows, K columns.

Source: DeepSeek-V3 technical report, arXiv:2412.19437, section 3.3.
"""

from __future__ import annotations

import torch
from torch import Tensor

from modelopt_lite.errors import ShapeError
from modelopt_lite.formats import fp8


def dequantize(
    codes_RK: Tensor,
    scale_inv: Tensor,
    block: tuple[int, int] = (128, 128),
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Return the [R, K] values, multiplied in float32 and rounded once to ``dtype``.

    Args:
        codes_RK: float8_e4m3fn [R, K]. NaN codes stay NaN.
        scale_inv: [ceil(R / rows of a block), ceil(K / columns of a block)], any float dtype.
        block: Rows and columns of a block.
        dtype: Of the result.

    Raises:
        ShapeError: ``scale_inv`` has another shape than the blocks ask for.
    """
    rows, columns = block
    if codes_RK.ndim != 2 or rows < 1 or columns < 1:
        raise ShapeError(
            f"block FP8 needs a matrix and positive blocks, got shape {list(codes_RK.shape)} and "
            f"block {list(block)}; correct weight_block_size in the source's config.json"
        )
    expected = (-(-codes_RK.shape[0] // rows), -(-codes_RK.shape[1] // columns))
    if tuple(scale_inv.shape) != expected:
        raise ShapeError(
            f"a block FP8 matrix {list(codes_RK.shape)} in blocks of {list(block)} needs "
            f"scale_inv of shape {list(expected)}, got {list(scale_inv.shape)}; check "
            "weight_block_size in the source's config.json"
        )
    out = torch.empty(codes_RK.shape, dtype=dtype, device=codes_RK.device)
    for index, scale_row in enumerate(scale_inv.float()):
        part = slice(index * rows, (index + 1) * rows)
        scale_K = scale_row.repeat_interleave(columns)[: codes_RK.shape[1]]
        out[part].copy_(fp8.decode(codes_RK[part]).mul_(scale_K))
    return out
