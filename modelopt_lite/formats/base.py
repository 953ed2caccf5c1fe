"""What every number format needs: constants, maxima, and how to cut a matrix into chunks.

Shape suffixes: R rows (output channels), K columns (input channels).
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Numerics = Literal["exact", "modelopt"]
"""``modelopt`` gives the bytes of Model Optimizer 0.47, ``exact`` the better arithmetic."""

E2M1_MAX = 6.0
E4M3_MAX = 448.0
E4M3_MIN_NORMAL = 2.0**-6
E4M3_MIN_SUBNORMAL = 2.0**-9
F32_TINY = torch.finfo(torch.float32).tiny

# Half a step against the value, at worst: a number just past a power of two, half way to the next
# of 8 steps, is (1/16) / (17/16) away.
E4M3_RELATIVE_ERROR = 1 / 17
# Below the smallest normal number the step is constant, so the error is at most half of it.
E4M3_ABSOLUTE_ERROR = E4M3_MIN_SUBNORMAL / 2

# The float32 quotient and product around a rounding add a few 2**-24 to each error bound.
F32_SLACK = 1 + 2.0**-20

# Enough elements that starting an operation (microseconds, ten to sixty times a chunk) is a small
# part of it, and few enough that the float32 temporaries stay in a core's share of the cache.
_CPU_CHUNK = 256 * 1024
# An accelerator wants few launches; its temporaries stay under 64 MiB each.
_DEVICE_CHUNK = 16 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of a quantized matrix as it lies on disk."""

    suffix: str
    """``weight``, ``weight_scale``, ``weight_scale_2`` or ``input_scale``."""
    dtype: torch.dtype
    shape: tuple[int, ...]


def amax(w: Tensor) -> Tensor:
    """Return the largest magnitude of a tensor as float32 [].

    NaN and infinity carry over, so ``isfinite`` on the result speaks for the whole tensor. An empty
    tensor gives 0.
    """
    if not w.numel():
        return torch.zeros((), dtype=torch.float32, device=w.device)
    low, high = torch.aminmax(w)
    return torch.maximum(-low.float(), high.float())


def amax_along(w: Tensor, axis: int) -> Tensor:
    """Return the largest magnitudes along an axis, float32; NaN and infinity carry over.

    Without their sign bit, floating-point numbers are in the order of their bits as integers, and
    NaN comes after all others. Comparing integers takes a fraction of the time.
    """
    bits = torch.int32 if w.dtype == torch.float32 else torch.int16
    return (w.view(bits) & torch.iinfo(bits).max).amax(axis).view(w.dtype).float()


def row_amax(w_RK: Tensor) -> Tensor:
    """Return the largest magnitude of each row, float32 [R] (or [E, R] of [E, R, K])."""
    if not w_RK.numel():
        return torch.zeros(w_RK.shape[:-1], dtype=torch.float32, device=w_RK.device)
    if w_RK.ndim != 2:
        return torch.stack([row_amax(part) for part in w_RK])
    return torch.cat([amax_along(w_RK[rows], -1) for rows in row_chunks(w_RK)])


def token_amax(x: Tensor) -> Tensor:
    """Return the largest magnitude of each token of ``x`` [..., K], float32 [..., 1]."""
    return row_amax(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], 1)


def block_amax(size: Tensor, block: int) -> Tensor:
    """Return the largest of each ``block`` neighbours of a contiguous float32 >= 0; NaN stays."""
    if size.device.type == "cpu" and size.numel():
        # Of positive numbers, and NaN, the bits as integers: the same maxima in half the time.
        return size.view(torch.int32).view(-1, block).amax(-1).view(torch.float32)
    return size.view(-1, block).amax(-1)


def sum_of_squares(x: Tensor) -> float:
    """Return the sum of the squares of float32 values, exact to about 1e-6 of itself."""
    flat = x.reshape(-1)
    total = float(torch.dot(flat, flat))
    # A thirteenth of the time of a sum in float64, which is for squares past float32's range.
    if 1e-20 < total < math.inf:
        return total
    return float(torch.linalg.vector_norm(flat, dtype=torch.float64)) ** 2


def chunk_rows(columns: int, device: torch.device) -> int:
    """Return how many rows of ``columns`` elements make one chunk on a device; at least 1."""
    size = _CPU_CHUNK if device.type == "cpu" else _DEVICE_CHUNK
    return max(1, size // max(1, columns))


def row_chunks(w_RK: Tensor, multiple: int = 1) -> Iterator[slice]:
    """Yield slices that cut [R, K] into runs of rows whose temporaries stay in the cache.

    Each begins at a multiple of ``multiple``.
    """
    step = chunk_rows(w_RK.shape[1], w_RK.device)
    step = max(1, step // multiple) * multiple
    for start in range(0, w_RK.shape[0], step):
        yield slice(start, min(start + step, w_RK.shape[0]))


def tiles(
    w_RK: Tensor, row_multiple: int = 1, column_multiple: int | None = None
) -> Iterator[tuple[slice, slice]]:
    """Yield rows and columns that cut [R, K] into parts whose temporaries stay in the cache.

    Each begins at a multiple of ``row_multiple`` and ``column_multiple``; without the latter, parts
    have all columns.
    """
    columns = w_RK.shape[1]
    step = columns
    if column_multiple is not None:
        fits = chunk_rows(row_multiple, w_RK.device)  # columns of the fewest rows
        step = min(columns, max(1, fits // column_multiple) * column_multiple)
    for start in range(0, columns, max(1, step)):
        part = slice(start, min(start + step, columns))
        for rows in row_chunks(w_RK[:, part], row_multiple):
            yield rows, part


class _Kept(threading.local):
    """Memory of one thread."""

    room: Tensor | None = None


_KEPT = _Kept()


def scratch(count: int, size: int, device: torch.device) -> Tensor:
    """Return float32 [count, size], undefined; on a CPU the thread's next call takes it again.

    Allocated anew for each matrix, its pages would be new ones each time, too.
    """
    if device.type != "cpu":
        return torch.empty(count, size, dtype=torch.float32, device=device)
    if _KEPT.room is None or _KEPT.room.numel() < count * size:
        with torch.inference_mode(False):  # for callers in it, and others
            _KEPT.room = torch.empty(count * size, dtype=torch.float32)
    return _KEPT.room[: count * size].view(count, size)


def rounded_up(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the smallest numbers of a dtype that are not below positive float32, as float32.

    A scale that is larger by a rounding still covers the amax that it was made of.
    """
    if dtype == torch.float32:
        return scale
    near = scale.to(dtype)
    # Without their sign, numbers are in the order of their bits.
    above = (near.view(torch.int16) + 1).view(dtype)
    return torch.where(near.float() < scale, above, near).float()


def sanitized_amax(amax: Tensor, maxbound: float) -> Tensor:
    """Return float32 amax, with 0 and NaN replaced by ``maxbound`` and the rest made normal.

    A matrix of zeros then has the scale 1 (in units of ``maxbound``) and not 0, by which nothing
    can be divided.
    """
    value = amax.float()
    value = torch.where((value > 0) | (value < 0), value, maxbound)
    return value.clamp(F32_TINY, torch.finfo(torch.float32).max)
