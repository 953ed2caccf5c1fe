"""E2M1, the 4-bit element of NVFP4 and MXFP4: rounding to it, reading it back, packing it.

A code is the sign in bit 3 over a magnitude code 0..7 for 0, 0.5, 1, 1.5, 2, 3, 4, 6. Two codes
share a byte, the even column in the low nibble.

Source: OCP Microscaling Formats v1.0, section 5.3.3.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Value of each magnitude code."""

# A float32 in [0, 2**23) plus 2**23 is rounded to an integer, ties to even, which then sits in the
# low bits of the sum.
_MAGIC = 2.0**23


def round_(size: Tensor, code: Tensor, spare: Tensor) -> Tensor:
    """Round magnitudes to E2M1, to nearest, ties to the even code; all past 6 becomes 6.

    Written for the processor's cache: no temporary, no boolean, no conversion.

    Args:
        size: float32 >= 0, contiguous. Read.
        code: float32 of that shape; receives the result.
        spare: float32 of that shape; overwritten.

    Returns:
        int32, a view of ``code``, the magnitude code in the low byte.
    """
    # E2M1 steps by 0.5 up to 2, by 1 up to 4, by 2 up to 6: three roundings to an integer, each
    # right in its range and larger than the right one outside it.
    torch.add(torch.full((), _MAGIC, device=size.device), size, alpha=2, out=code)
    torch.add(size, _MAGIC + 2, out=spare)
    torch.minimum(code, spare, out=code)
    torch.add(torch.full((), _MAGIC + 4, device=size.device), size, alpha=0.5, out=spare)
    torch.minimum(code, spare.clamp_(max=_MAGIC + 7), out=code)
    return code.view(torch.int32)


def round_down_(size: Tensor, code: Tensor, spare: Tensor) -> Tensor:
    """Round magnitudes to E2M1, to nearest, ties toward zero; else as `round_`."""
    torch.mul(size, 2, out=code).sub_(0.5).ceil_()
    torch.sub(size, 0.5, out=spare).ceil_().add_(2)
    torch.minimum(code, spare, out=code)
    torch.mul(size, 0.5, out=spare).sub_(0.5).ceil_().add_(4).clamp_(max=7)
    return torch.minimum(code, spare, out=code).add_(_MAGIC).view(torch.int32)


def pack_signed(magnitude: Tensor, value: Tensor) -> Tensor:
    """Join magnitude codes with the sign bits of values, and two codes to a byte.

    Args:
        magnitude: int32 [2 N], contiguous, the code in the low byte; overwritten.
        value: float32 [2 N], contiguous; overwritten.

    Returns:
        int16 [N], the byte in its low half.
    """
    sign = value.view(torch.int32).bitwise_right_shift_(31)  # 0 or -1
    nibble = magnitude.sub_(sign, alpha=8).to(torch.uint8)  # keeps the low byte
    pair = nibble.view(torch.int16)  # 0x0H0L, H the odd column
    return pair.bitwise_or_(pair >> 4)


def decode(packed: Tensor) -> Tensor:
    """Return the values of packed codes: uint8 [..., P] to float32 [..., 2 P]; code 8 is -0.0."""
    table = _byte_values(packed.device)
    pairs = torch.index_select(table, 0, packed.reshape(-1).int())
    return pairs.view(torch.float32).view(*packed.shape[:-1], packed.shape[-1] * 2)


@functools.cache
def _byte_values(device: torch.device) -> Tensor:
    """The pair of values that each byte stands for, as one 8-byte element: int64 [256]."""
    values = torch.tensor(MAGNITUDES)
    values = torch.cat([values, -values])
    pairs = torch.stack([values.repeat(16), values.repeat_interleave(16)], dim=1)
    return pairs.view(torch.int64).view(-1).to(device)


def unpack(packed: Tensor) -> Tensor:
    """Return the codes 0..15 of packed bytes: uint8 [..., P] to uint8 [..., 2 P]."""
    return torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2)


def pack(codes: Tensor) -> Tensor:
    """Return codes 0..15 two to a byte: uint8 [..., K] to uint8 [..., K / 2], K even."""
    return codes[..., ::2] | (codes[..., 1::2] << 4)
