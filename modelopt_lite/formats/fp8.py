"""FP8 E4M3: one byte an element, a float32 scale a tensor, a row or a token.

A value is ``code * scale``. Codes reach 448; there is no infinity.

Shape suffixes: R rows, K columns; a leading E (experts) is allowed everywhere.

Source: Micikevicius et al., FP8 Formats for Deep Learning, arXiv:2209.05433.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from modelopt_lite.errors import ShapeError
from modelopt_lite.formats.base import (
    E4M3_ABSOLUTE_ERROR,
    E4M3_MAX,
    E4M3_RELATIVE_ERROR,
    F32_SLACK,
    F32_TINY,
    Numerics,
    amax,
    chunk_rows,
    row_chunks,
    sanitized_amax,
    token_amax,
)

DTYPE = torch.float8_e4m3fn

# Largest error of rounding to nearest, relative to the value: u / (1 + u), u half a step at 1.
_QUOTIENT_ERROR = {torch.bfloat16: 1 / 257, torch.float16: 1 / 2049}


def scale_from_amax(largest: Tensor, *, numerics: Numerics = "exact") -> Tensor:
    """Return the scale that maps the largest magnitude to 448, float32 of the same shape.

    Args:
        largest: [] or any shape, any float dtype, >= 0. 0 and NaN give the scale 1.
        numerics: ``exact`` never goes below the smallest normal float32, so that no quotient
            overflows and devices that flush subnormals never divide by 0.
    """
    scale = (sanitized_amax(largest, E4M3_MAX).double() / E4M3_MAX).float()
    return scale.clamp_min(F32_TINY) if numerics == "exact" else scale


def quantize(w: Tensor, scale: Tensor, *, numerics: Numerics, out: Tensor | None = None) -> Tensor:
    """Round ``w / scale`` to E4M3, to nearest, ties to even; magnitudes past 448 become 448.

    Args:
        w: Any shape, finite, bfloat16, float16 or float32. Read, never written; any strides.
        scale: float32, > 0: [], one a row (``w.shape[:-1]``), or as many axes as ``w``.
        numerics: With ``exact`` the quotient is float32. With ``modelopt`` a 0-d scale leaves it in
            the dtype of ``w``, which rounds it twice; other scales give float32 in both.
        out: float8_e4m3fn of the shape of ``w``, written and returned.

    Returns:
        float8_e4m3fn of the shape of ``w``, within ``error_bound``. NaN in ``w`` stays NaN.

    Raises:
        ShapeError: ``scale`` fits neither form.
    """
    if out is None:
        out = torch.empty(w.shape, dtype=DTYPE, device=w.device)
    keep_dtype = numerics == "modelopt" and scale.ndim == 0
    work = torch.empty(0, dtype=w.dtype if keep_dtype else torch.float32, device=w.device)
    for w_RK, scale_part, out_RK in _matrices(w, _aligned(scale, w), out):
        columns = w_RK.shape[1]
        size = min(chunk_rows(columns, w.device), w_RK.shape[0]) * columns
        if work.numel() < size:
            work = work.new_empty(size)
        for rows in row_chunks(w_RK):
            quotient = work[: (rows.stop - rows.start) * columns].view(-1, columns)
            divisor = _rows_of(scale_part, rows)
            if keep_dtype:
                torch.div(w_RK[rows], divisor, out=quotient)
            else:
                quotient.copy_(w_RK[rows]).div_(divisor)
            out_RK[rows].copy_(quotient.clamp_(-E4M3_MAX, E4M3_MAX))
    return out


def dequantize(codes: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return ``codes * scale``, multiplied in float32, then rounded once to ``dtype``.

    Args:
        codes: float8_e4m3fn, any shape. NaN codes stay NaN.
        scale: As for ``quantize``.
        dtype: Of the result.
    """
    scale = _aligned(scale, codes)
    out = torch.empty(codes.shape, dtype=dtype, device=codes.device)
    for codes_RK, scale_part, out_RK in _matrices(codes, scale, out):
        for rows in row_chunks(codes_RK):
            multiply(codes_RK[rows], _rows_of(scale_part, rows), out_RK[rows])
    return out


def multiply(codes: Tensor, scale: Tensor, out: Tensor) -> None:
    """Write ``codes * scale``, multiplied in float32, to ``out``, which rounds to its dtype.

    Args:
        codes: float8_e4m3fn, any shape.
        scale: float32, at most 1e36; its shape broadcasts to that of ``codes``.
        out: Any float dtype, of the shape of ``codes``.
    """
    value, over = _decoded(codes)
    step = scale * over  # a power of two, so exact, and one pass less over the values
    if out.dtype == torch.float32:
        torch.mul(value, step, out=out)
    else:
        out.copy_(value.mul_(step))


def decode(codes: Tensor) -> Tensor:
    """Return the values of E4M3 codes, float32 of the same shape, contiguous."""
    value, over = _decoded(codes)
    return value if over == 1 else value.mul_(over)


def _decoded(codes: Tensor) -> tuple[Tensor, int]:
    """Return the values of E4M3 codes over a power of two, float32, contiguous; and that power."""
    if codes.device.type != "cpu":
        return codes.float(), 1
    # The processor's own conversion goes element by element. Moved to the bits of a float16, whose
    # exponent has a bias of 15 and not of 7, a code is its value over 2**8, in a tenth of the time;
    # but for NaN, all bits of the exponent and the fraction.
    byte = codes.contiguous().view(torch.int8)
    half = byte.to(torch.int16).bitwise_left_shift_(7).bitwise_and_(~(1 << 14))
    values = half.view(torch.float16).float()
    if codes.numel() and int((byte & 127).amax()) == 127:
        values[(byte & 127) == 127] = torch.nan
    return values, 256


def error_bound(w: Tensor, scale: Tensor, *, numerics: Numerics) -> Tensor:
    """Return the largest ``|dequantize(quantize(w)) - w|`` of each element, float32, shape of w.

    It is ``|w| / 17`` where the quotient is a normal E4M3 number (``|w| >= 2**-6 * scale``), and
    ``2**-10 * scale``, but never more than ``|w|``, below. Where ``numerics`` rounds the quotient
    to the dtype of ``w``, that error (1/257 of the value in bfloat16) comes on top. It stops
    holding where ``|w| > 448 * scale``: such elements are clipped.
    """
    size = w.abs() if w.dtype == torch.float32 else w.float().abs_()
    narrow = numerics == "modelopt" and scale.ndim == 0
    extra = _QUOTIENT_ERROR.get(w.dtype, 0.0) if narrow else 0.0
    # An element that becomes 0 is off by itself, exactly; all else needs the slack of float32.
    step = _aligned(scale, w) * (E4M3_ABSOLUTE_ERROR * F32_SLACK)
    # A tensor without axes takes `minimum` off its vectorized path.
    floor = torch.minimum(size, step) if step.ndim else size.clamp(max=float(step))
    if extra:
        relative = size * (E4M3_RELATIVE_ERROR * (1 + extra) * F32_SLACK)
        return torch.maximum(relative, floor, out=floor).add_(size, alpha=extra * F32_SLACK)
    return torch.maximum(size.mul_(E4M3_RELATIVE_ERROR * F32_SLACK), floor, out=floor)


def fake_quantize(x: Tensor, scale: Tensor) -> Tensor:
    """Return ``x`` rounded as an engine's FP8 kernel sees it, in the dtype of ``x``.

    Args:
        x: Activations of any shape.
        scale: float32 [] = amax / 448 of the calibration; larger magnitudes are clipped.
    """
    return dequantize(quantize(x, scale, numerics="exact"), scale, x.dtype)


def fake_quantize_per_tensor(x: Tensor) -> Tensor:
    """Return ``x`` rounded to FP8 with one scale that it is given at run time."""
    return fake_quantize(x, scale_from_amax(amax(x)))


def fake_quantize_per_token(x: Tensor) -> Tensor:
    """Return ``x`` [..., K] rounded to FP8 with a scale of its own for each token."""
    return fake_quantize(x, scale_from_amax(token_amax(x)))


def _aligned(scale: Tensor, w: Tensor) -> Tensor:
    """Return ``scale`` in a shape that broadcasts against ``w``: [] or as many axes."""
    if scale.ndim == 0:
        return scale
    if scale.shape == w.shape[:-1]:
        return scale.unsqueeze(-1)
    fits = scale.ndim == w.ndim and all(
        s in (1, n) for s, n in zip(scale.shape, w.shape, strict=True)
    )
    if not fits:
        raise ShapeError(
            f"an FP8 scale of shape {list(scale.shape)} does not fit a tensor of shape "
            f"{list(w.shape)}: give one scale, one a row {list(w.shape[:-1])}, or a shape that "
            "broadcasts"
        )
    return scale


def _rows_of(scale: Tensor, rows: slice) -> Tensor:
    """Return the part of an aligned scale ([], [1, *] or [R, *]) that belongs to some rows."""
    return scale[rows] if scale.ndim == 2 and scale.shape[0] > 1 else scale


def _matrices(w: Tensor, scale: Tensor, out: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield (w, scale, out) of every matrix in a stack; vectors and scalars count as one row."""
    if w.ndim == 2:
        yield w, scale, out
    elif w.ndim < 2:
        yield w.reshape(1, -1), scale.reshape(1, -1) if scale.ndim else scale, out.view(1, -1)
    else:
        for e in range(w.shape[0]):
            part = scale if scale.ndim == 0 else scale[e if scale.shape[0] > 1 else 0]
            yield from _matrices(w[e], part, out[e])
