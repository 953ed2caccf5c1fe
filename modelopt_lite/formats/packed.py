"""Small integers in 32-bit words, as the compressed-tensors format "pack-quantized" keeps them.

A code is stored plus ``2**(bits - 1)``, so that it is not negative; the first of a word's columns
lies in its lowest bits. Where a row's columns do not fill its last word, zeros do.

Shape suffixes: R rows, K columns, W words in a row, G groups of columns that share a scale.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from modelopt_lite.errors import ShapeError
from modelopt_lite.formats.base import row_chunks

WORD = 32


def words(columns: int, bits: int) -> int:
    """Return how many words hold a row."""
    return -(-columns // (WORD // bits))


def pack(codes_RK: Tensor, bits: int) -> Tensor:
    """Return int32 [R, W] of int8 [R, K]; ``bits`` is 4 or 8."""
    count = WORD // bits
    rows, columns = codes_RK.shape
    packed = codes_RK.new_zeros((rows, words(columns, bits)), dtype=torch.int32)
    for part in row_chunks(codes_RK):
        unsigned = codes_RK[part].int().add_(1 << (bits - 1)).bitwise_and_((1 << bits) - 1)
        unsigned = functional.pad(unsigned, (0, -columns % count)).unflatten(1, (-1, count))
        for at in range(count):
            packed[part] |= unsigned[:, :, at] << (bits * at)
    return packed


def unpack(packed_RW: Tensor, columns: int, bits: int) -> Tensor:
    """Return int8 [R, K] of int32 [R, W]; the reverse of `pack`.

    Raises:
        ShapeError: Rows of K columns have another number of words.
    """
    if words(columns, bits) != packed_RW.shape[1]:
        raise ShapeError(
            f"rows of {columns} codes of {bits} bits need {words(columns, bits)} words, got "
            f"{packed_RW.shape[1]}; the source's weight_packed and weight_shape do not belong "
            "together"
        )
    count = WORD // bits
    codes = packed_RW.new_empty((packed_RW.shape[0], columns), dtype=torch.int8)
    shifts = torch.arange(0, WORD, bits, dtype=torch.int32, device=packed_RW.device)
    for part in row_chunks(codes):
        unsigned = (packed_RW[part].unsqueeze(-1) >> shifts).bitwise_and_((1 << bits) - 1)
        signed = unsigned.sub_(1 << (bits - 1)).view(-1, packed_RW.shape[1] * count)
        codes[part].copy_(signed[:, :columns])
    return codes


def dequantize(
    codes_RK: Tensor, scale_RG: Tensor, dtype: torch.dtype, zero_RG: Tensor | None = None
) -> Tensor:
    """Return ``(code - zero) * scale``, multiplied in float32, then rounded once to ``dtype``.

    Args:
        codes_RK: int8.
        scale_RG: Any float dtype; K is a multiple of G.
        dtype: Of the result.
        zero_RG: int8; None for zeros.
    """
    out = torch.empty_like(codes_RK, dtype=dtype)
    groups = scale_RG.shape[1]
    for part in row_chunks(codes_RK):
        value = codes_RK[part].float().unflatten(1, (groups, -1))
        if zero_RG is not None:
            value.sub_(zero_RG[part].float().unsqueeze(-1))
        out[part].copy_(value.mul_(scale_RG[part].float().unsqueeze(-1)).flatten(1))
    return out
