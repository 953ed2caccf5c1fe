"""E8M0, the block scale of the MX formats: a power of two in a byte, its exponent plus 127.

255 stands for NaN and is never written. Byte 0 is 2**-127, a subnormal float32.

Source: OCP Microscaling Formats v1.0, section 5.4.1.
"""

from __future__ import annotations

import torch
from torch import Tensor

from modelopt_lite.formats.base import Numerics

BIAS = 127
NAN = 255

_MANTISSA_BITS = 23
_SMALLEST = 1 << (_MANTISSA_BITS - 1)  # the bits of 2**-127


def scale_from_amax(amax: Tensor, *, largest: float, numerics: Numerics = "exact") -> Tensor:
    """Return the smallest power of two under which ``amax`` stays within ``largest``.

    Args:
        amax: float32 of any shape, >= 0, finite. 0 gives byte 0.
        largest: 6 for E2M1, 448 for E4M3.
        numerics: ``exact`` compares bits. ``modelopt`` rounds a float32 logarithm up, which a
            float32 amax some 2**-20 above a power of two times ``largest`` can escape.

    Returns:
        uint8 of the shape of ``amax``.
    """
    if numerics == "modelopt":
        exponent = torch.log2(amax / largest).clamp_(-BIAS, BIAS).ceil_()
        return exponent.add_(BIAS).to(torch.uint8)
    # Positive floats are in the order of their bits, and a step of the exponent adds 2**23 to them.
    edge = torch.tensor(largest).view(torch.int32).item()
    exponent = (amax.view(torch.int32) - edge + (1 << _MANTISSA_BITS) - 1) >> _MANTISSA_BITS
    return exponent.clamp_(-BIAS, BIAS).add_(BIAS).to(torch.uint8)


def decode(scale: Tensor) -> Tensor:
    """Return the powers of two of bytes below 255, float32 of the same shape; exact."""
    bits = (scale.int() << _MANTISSA_BITS).clamp_min_(_SMALLEST)
    return bits.view(torch.float32)


def inverse(scale: Tensor) -> Tensor:
    """Return one over the powers of two of bytes below 255, float32 of the same shape; exact."""
    return decode(2 * BIAS - scale)
