"""Search the block scales of NVFP4: for each block of 16, the E4M3 scale that loses least.

There are 126 positive finite E4M3 numbers. Few of them can be best for a block, and only those are
tried:

- Where no value of a block exceeds 6 steps, every value of the grid of 2 steps that can be reached
  is also on the grid of 1 step: {0, 1, 2, 3, 4, 6} of {0, .5, 1, 1.5, 2, 3, 4, 6}. So a scale is no
  better than its half, if its half is an E4M3 number and the block's largest value is within 6
  steps of it.
- A scale under which the largest value is clipped loses at least the square of what is clipped, and
  a smaller one loses more. So the search downwards ends where that exceeds the best loss.

Shape suffixes: N blocks, S = 16 elements of a block.
"""

from __future__ import annotations

import torch
from torch import Tensor

from modelopt_lite.formats import fp8, nvfp4
from modelopt_lite.formats.base import E2M1_MAX, E4M3_MAX, block_amax, row_chunks
from modelopt_lite.formats.linear import LinearFormat

_CODES = 126  # E4M3 codes 1 to 126 are its positive finite numbers, in their order
_OCTAVE = 8  # codes from a normal number to its double
_ALL_HALVES = 16  # from this code on the half of every number is one
_ONE_BIT = -0x400000  # sign, exponent and the first bit of the mantissa of a float32
_HALF_OF_BIT = 0x200000
_MAGIC = 1.5 * 2.0**22  # added and taken away, rounds a float32 to a multiple of 0.5


def sweep_problem(fmt: LinearFormat) -> str | None:
    """Return why the block scales of a format cannot be swept, None if they can."""
    if fmt.codec.sweeps:
        return None
    return f"it has no E4M3 scales of {nvfp4.BLOCK} elements that can each be any number"


def best_block_scales(w_RK: Tensor, scale_2: Tensor) -> Tensor:
    """Return the scale of each block under which the squared error is least, the least of equals.

    Args:
        w_RK: [R, K], K a multiple of 16, any float dtype, finite.
        scale_2: float32 [] > 0, the scale of the matrix.

    Returns:
        float8_e4m3fn [R, K / 16].
    """
    codes_RB = torch.empty(
        (len(w_RK), w_RK.shape[1] // nvfp4.BLOCK), dtype=torch.uint8, device=w_RK.device
    )
    for rows in row_chunks(w_RK):
        size_NS = w_RK[rows].float().abs().reshape(-1, nvfp4.BLOCK)
        codes_RB[rows] = _Sweep(size_NS, scale_2).best().view(codes_RB[rows].shape)
    return codes_RB.view(fp8.DTYPE)


class _Sweep:
    """The search for one chunk of blocks."""

    def __init__(self, size_NS: Tensor, scale_2: Tensor) -> None:
        self._size = size_NS
        self._values = torch.arange(128, dtype=torch.uint8, device=size_NS.device)
        self._steps = self._values.view(fp8.DTYPE).float() * scale_2  # of each code; 127 is NaN
        self._amax = block_amax(size_NS.view(-1), nvfp4.BLOCK)
        natural = (self._amax / (E2M1_MAX * scale_2)).clamp_(max=E4M3_MAX).to(fp8.DTYPE)
        self._first = natural.view(torch.uint8).int().clamp_(1, _CODES)
        self._best = self._first.clone()
        self._loss = self._losses(slice(None), self._first)

    def best(self) -> Tensor:
        """Return the best code of each block, int32 [N]."""
        for offset in range(1, _OCTAVE + 1):
            self._try(slice(None), (self._first + offset).clamp_(max=_CODES))
        # What is left of scales whose half is no E4M3 number, for blocks near zero.
        for code in range(1, _ALL_HALVES):
            low = (self._first + _OCTAVE < code).nonzero().view(-1)
            if not len(low):
                continue
            self._try(low, torch.full_like(self._first[low], code))
        self._down()
        return self._best

    def _down(self) -> None:
        offset, open_ = 1, torch.arange(len(self._first), device=self._first.device)
        while len(open_):
            code = self._first[open_] - offset
            clipped = self._amax[open_] - self._steps[code.clamp(min=1)] * E2M1_MAX
            viable = (code >= 1) & (clipped.clamp_(min=0).square_() <= self._loss[open_])
            open_, offset = open_[viable], offset + 1
            self._try(open_, code[viable], smaller=True)

    def _try(self, blocks: Tensor | slice, code: Tensor, *, smaller: bool = False) -> None:
        """Take another code where it loses less, or as little and is smaller."""
        loss, before = self._losses(blocks, code), self._loss[blocks]
        better = loss <= before if smaller else loss < before
        self._best[blocks] = torch.where(better, code, self._best[blocks])
        self._loss[blocks] = torch.where(better, loss, before)

    def _losses(self, blocks: Tensor | slice, code: Tensor) -> Tensor:
        step = self._steps[code]
        scaled = self._size[blocks] / step.unsqueeze(-1)
        error_NS = rounding_error(scaled)
        squares: Tensor = torch.linalg.vecdot(error_NS, error_NS)
        return squares.mul_(step).mul_(step)


def rounding_error(size: Tensor) -> Tensor:
    """Return by how much magnitudes change when rounded to E2M1 and clipped to 6, float32.

    Where two values are equally near, the error is the same, so ties need no care.
    """
    inside = size.clamp(max=E2M1_MAX)
    # Past 1, E2M1 has one bit after the leading one; below, and there too, it has multiples of .5.
    # The coarser of the two roundings, which is the right one, has the larger error.
    one_bit = (inside.view(torch.int32) + _HALF_OF_BIT).bitwise_and_(_ONE_BIT).view(torch.float32)
    halves = (inside + _MAGIC).sub_(_MAGIC)
    error = torch.maximum(one_bit.sub_(inside).abs_(), halves.sub_(inside).abs_())
    return error.add_(size).sub_(inside)
