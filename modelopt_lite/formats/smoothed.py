"""What stands beside the codes of a smoothed matrix, and what all of it together stands for.

Inputs x are multiplied by a scale s of their channels, and low-rank factors a and b may be kept
apart: a product is ``Q(x * s) @ W.T + ((x * s) @ a.T) @ b.T`` with W the codes' values and Q the
rounding of inputs. Without that rounding it is the product of x with ``(W + b @ a) * s``.

Shape suffixes: R rows (output channels), K columns (input channels), L the rank.
"""

from __future__ import annotations

import torch
from torch import Tensor

PRE_QUANT_SCALE = "pre_quant_scale"
"""[K], the suffix of s."""
LORA_A, LORA_B = FACTORS = ("svdquant_lora_a", "svdquant_lora_b")
"""[..., L, K] and [..., R, L], the suffixes of a and b."""
PEER_PREFIX = "weight_quantizer._"
"""What Model Optimizer writes before the names of factors."""


def unsmoothed(
    value: Tensor, scale_K: Tensor | None, factors: tuple[Tensor, ...], *, input_major: bool
) -> Tensor:
    """Return ``(value + b @ a) * s``.

    Args:
        value: float32 [R, K] or [E, R, K], with ``input_major`` [..., K, R]; may be overwritten.
        scale_K: s, in any dtype; None for 1.
        factors: a and b, in any dtype; empty for none.
        input_major: The input channels are the last axis but one.

    Returns:
        float32; within ``2**-23 * (|value| + |b| @ |a| * (L + 1)) * s`` of the real number.
    """
    if factors:
        a, b = (factor.float() for factor in factors)
        product = b @ a
        value = value.add_(product.transpose(-1, -2) if input_major else product)
    if scale_K is None:
        return value
    scale = scale_K.float()
    return value.mul_(scale.unsqueeze(-1) if input_major else scale)


def kept_product(x: Tensor, a_LK: Tensor, b_RL: Tensor) -> Tensor:
    """Return ``(x @ a.T) @ b.T`` of x [..., K], float32 [..., R]."""
    return torch.matmul(torch.matmul(x.float(), a_LK.float().mT), b_RL.float().mT)
