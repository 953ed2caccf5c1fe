"""The number formats of linear layers behind one interface.

Shape letters: E experts, R or out rows, K or in columns. A matrix is [out, in]; a stack of matrices
is [E, out, in] or, ``input_major``, [E, in, out] as gpt-oss keeps it. Blocks run along ``in`` in
each case.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

import torch
from torch import Tensor

from modelopt_lite.errors import InternalError, NonFiniteError, RecipeError
from modelopt_lite.formats import base, fp8, nvfp4
from modelopt_lite.formats.base import Numerics, TensorSpec, row_chunks


class LinearFormat(Protocol):
    """What the plan, the exporter and the audit need to know of a number format."""

    @property
    def name(self) -> str:
        """The name in recipes and in ``FORMATS``."""

    @property
    def quant_algo(self) -> str:
        """The name in the exported configuration."""

    @property
    def group_size(self) -> int | None:
        """Elements that share a block scale, None without blocks."""

    @property
    def static_input(self) -> bool:
        """Whether the export has an ``input_scale``, so that calibration data is needed."""

    @property
    def weight_bits(self) -> float:
        """Bits an element, block scales included."""

    @property
    def shares_weight_amax(self) -> bool:
        """Whether matrices that an engine fuses must be quantized with their common amax."""

    def problem(self, shape: tuple[int, ...], *, stacked_input_major: bool = False) -> str | None:
        """Return why a matrix or stack of this shape cannot be quantized, None if it can."""

    def tensors(
        self, shape: tuple[int, ...], *, stacked_input_major: bool = False
    ) -> tuple[TensorSpec, ...]:
        """Return the tensors on disk: weight, weight_scale, weight_scale_2, input_scale."""

    def quantize(
        self, w: Tensor, amax: Tensor | None, *, numerics: Numerics, input_major: bool = False
    ) -> dict[str, Tensor]:
        """Return the tensors on disk but ``input_scale``, by suffix, contiguous.

        Args:
            w: [out, in], [E, out, in], or with ``input_major`` [E, in, out]; bfloat16, float16 or
                float32; read, never written.
            amax: float32 [], of all matrices that share the scale, where ``shares_weight_amax``;
                None takes that of ``w``. Other formats ignore it.
            numerics: Which arithmetic.
            input_major: The last two axes of ``w`` are swapped, and so are those of the result.

        Raises:
            NonFiniteError: The amax is NaN or infinite.
            ShapeError: See ``problem``.
        """

    def dequantize(
        self, tensors: Mapping[str, Tensor], dtype: torch.dtype, *, input_major: bool = False
    ) -> Tensor:
        """Return the values of what ``quantize`` gave, in the layout of its ``w``."""

    def max_error(
        self,
        w: Tensor,
        tensors: Mapping[str, Tensor],
        *,
        numerics: Numerics,
        input_major: bool = False,
    ) -> Tensor:
        """Return the largest float32 error of each element, of the shape of ``w``.

        It follows from ``w`` and the scalars or row scales in ``tensors``; the formats' modules
        state it under ``error_bound``. A ``dtype`` other than float32 adds its own rounding.
        """

    def input_scale(self, amax: Tensor) -> Tensor:
        """Return float32 [], the scale of the activations; an amax of 0 counts as the largest code.

        Raises:
            NonFiniteError: The amax is NaN or infinite.
            InternalError: The format has no ``input_scale``.
        """

    def fake_quantize_input(self, x: Tensor, input_scale: Tensor | None) -> Tensor:
        """Return activations [..., in] as the engine's kernel would round them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fp8:
    """FP8 E4M3 with one scale a matrix or one a row."""

    name: str
    quant_algo: str
    per_row: bool
    group_size: int | None = None
    weight_bits: float = 8.0

    @property
    def static_input(self) -> bool:
        return not self.per_row

    @property
    def shares_weight_amax(self) -> bool:
        return not self.per_row

    def problem(self, shape: tuple[int, ...], *, stacked_input_major: bool = False) -> str | None:
        return _shape_problem(shape, stacked_input_major)

    def tensors(
        self, shape: tuple[int, ...], *, stacked_input_major: bool = False
    ) -> tuple[TensorSpec, ...]:
        lead, out, _ = _parts(shape, stacked_input_major)
        weight = TensorSpec("weight", fp8.DTYPE, shape)
        if self.per_row:
            return weight, TensorSpec("weight_scale", torch.float32, (*lead, out))
        return (
            weight,
            TensorSpec("weight_scale", torch.float32, ()),
            TensorSpec("input_scale", torch.float32, ()),
        )

    def quantize(
        self, w: Tensor, amax: Tensor | None, *, numerics: Numerics, input_major: bool = False
    ) -> dict[str, Tensor]:
        if self.per_row:
            amax = base.row_amax(w.transpose(-1, -2) if input_major else w)
        elif amax is None:
            amax = base.amax(w)
        scale = fp8.scale_from_amax(_finite(amax, "a weight"), numerics=numerics)
        weight = fp8.quantize(w, self._aligned(scale, w.ndim, input_major), numerics=numerics)
        return {"weight": weight, "weight_scale": scale}

    def dequantize(
        self, tensors: Mapping[str, Tensor], dtype: torch.dtype, *, input_major: bool = False
    ) -> Tensor:
        scale = self._aligned(tensors["weight_scale"], tensors["weight"].ndim, input_major)
        return fp8.dequantize(tensors["weight"], scale, dtype)

    def max_error(
        self,
        w: Tensor,
        tensors: Mapping[str, Tensor],
        *,
        numerics: Numerics,
        input_major: bool = False,
    ) -> Tensor:
        scale = self._aligned(tensors["weight_scale"], w.ndim, input_major)
        return fp8.error_bound(w, scale, numerics=numerics)

    def input_scale(self, amax: Tensor) -> Tensor:
        if not self.static_input:
            raise InternalError(f"{self.name} scales activations per token: no input_scale exists")
        return fp8.scale_from_amax(_finite(amax, "an activation"))

    def fake_quantize_input(self, x: Tensor, input_scale: Tensor | None) -> Tensor:
        if self.per_row:
            return fp8.fake_quantize_per_token(x)
        return fp8.fake_quantize(x, _given(input_scale, self.name))

    def _aligned(self, scale: Tensor, ndim: int, input_major: bool) -> Tensor:
        if not self.per_row:
            # A stack's scale has axes in the peer, too, so that its quotient stays float32.
            return scale.view(1, 1, 1) if ndim == 3 else scale
        return scale.unsqueeze(-2) if input_major else scale.unsqueeze(-1)


@dataclass(frozen=True, slots=True, kw_only=True)
class _NvFp4:
    """NVFP4 weights; activations NVFP4 too (``static_input``) or left alone."""

    name: str
    quant_algo: str
    static_input: bool
    group_size: int | None = nvfp4.BLOCK
    weight_bits: float = 4.5
    shares_weight_amax: bool = True

    def problem(self, shape: tuple[int, ...], *, stacked_input_major: bool = False) -> str | None:
        if problem := _shape_problem(shape, stacked_input_major):
            return problem
        _, _, columns = _parts(shape, stacked_input_major)
        if columns % nvfp4.BLOCK:
            return f"K={columns} is not a multiple of {nvfp4.BLOCK}"
        return None

    def tensors(
        self, shape: tuple[int, ...], *, stacked_input_major: bool = False
    ) -> tuple[TensorSpec, ...]:
        lead, out, columns = _parts(shape, stacked_input_major)

        def layout(width: int) -> tuple[int, ...]:
            return (*lead, width, out) if stacked_input_major else (*lead, out, width)

        specs = (
            TensorSpec("weight", torch.uint8, layout(columns // 2)),
            TensorSpec("weight_scale", fp8.DTYPE, layout(columns // nvfp4.BLOCK)),
            TensorSpec("weight_scale_2", torch.float32, ()),
        )
        if self.static_input:
            return (*specs, TensorSpec("input_scale", torch.float32, ()))
        return specs

    def quantize(
        self, w: Tensor, amax: Tensor | None, *, numerics: Numerics, input_major: bool = False
    ) -> dict[str, Tensor]:
        amax = _finite(base.amax(w) if amax is None else amax, "a weight")
        scale_2 = nvfp4.weight_scale_2(amax, numerics=numerics)
        packed, scale = nvfp4.quantize(_oriented(w, input_major), scale_2)
        return {
            "weight": _oriented(packed, input_major).contiguous(),
            "weight_scale": _oriented(scale, input_major).contiguous(),
            "weight_scale_2": scale_2,
        }

    def dequantize(
        self, tensors: Mapping[str, Tensor], dtype: torch.dtype, *, input_major: bool = False
    ) -> Tensor:
        packed = _oriented(tensors["weight"], input_major)
        scale = _oriented(tensors["weight_scale"], input_major)
        value = nvfp4.dequantize(packed, scale, tensors["weight_scale_2"], dtype)
        return _oriented(value, input_major).contiguous()

    def max_error(
        self,
        w: Tensor,
        tensors: Mapping[str, Tensor],
        *,
        numerics: Numerics,
        input_major: bool = False,
    ) -> Tensor:
        bound = nvfp4.error_bound(_oriented(w, input_major), tensors["weight_scale_2"])
        return _oriented(bound, input_major)

    def input_scale(self, amax: Tensor) -> Tensor:
        if not self.static_input:
            raise InternalError(f"{self.name} leaves activations alone: no input_scale exists")
        return nvfp4.weight_scale_2(_finite(amax, "an activation"))

    def fake_quantize_input(self, x: Tensor, input_scale: Tensor | None) -> Tensor:
        if not self.static_input:
            return x
        return nvfp4.fake_quantize(x, _given(input_scale, self.name))


FORMATS: Mapping[str, LinearFormat] = MappingProxyType(
    {
        f.name: f
        for f in (
            _Fp8(name="fp8", quant_algo="FP8", per_row=False),
            _Fp8(
                name="fp8_per_channel_per_token",
                quant_algo="FP8_PER_CHANNEL_PER_TOKEN",
                per_row=True,
            ),
            _NvFp4(name="nvfp4", quant_algo="NVFP4", static_input=True),
            _NvFp4(name="w4a16_nvfp4", quant_algo="W4A16_NVFP4", static_input=False),
        )
    }
)
"""Every format by name."""


def get_format(name: str) -> LinearFormat:
    """Return a format by the name that recipes call it.

    Raises:
        RecipeError: There is no such format.
    """
    if name not in FORMATS:
        near = difflib.get_close_matches(name, FORMATS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise RecipeError(f"unknown format {name!r}{hint}; known: {', '.join(sorted(FORMATS))}")
    return FORMATS[name]


@dataclass(frozen=True, slots=True)
class ErrorReport:
    """How far quantized values lie from their source."""

    worst: float
    """Largest ``|error| / max_error``; a right export has at most 1. NaN where a value is NaN."""
    relative: float
    """Root of the summed squared errors over the root of the summed squares; 0 for all zeros."""


def measure_error(
    fmt: LinearFormat,
    w: Tensor,
    tensors: Mapping[str, Tensor],
    *,
    numerics: Numerics,
    input_major: bool = False,
) -> ErrorReport:
    """Compare what ``fmt.quantize`` gave with its source, a few rows at a time.

    Args:
        fmt: The format.
        w: As for ``fmt.quantize``.
        tensors: weight and its scales, by suffix; others are ignored.
        numerics: The arithmetic that made ``tensors``; ``modelopt`` if unknown, its bound is wider.
        input_major: As for ``fmt.quantize``.
    """
    worst = torch.zeros((), dtype=torch.float32, device=w.device)
    error_sum = source_sum = 0.0
    for w_RK, parts in _matrices(w, tensors, input_major):
        for rows in row_chunks(w_RK):
            part = {k: v[rows] if v.ndim else v for k, v in parts.items()}
            source = w_RK[rows].float()
            bound = fmt.max_error(w_RK[rows], part, numerics=numerics)
            error = fmt.dequantize(part, torch.float32).sub_(source).abs_()
            error_sum += base.sum_of_squares(error)
            source_sum += base.sum_of_squares(source)
            # The smallest divisor keeps 0 / 0 at 0 and lets any error where none is due stand out.
            ratio = error.div_(bound.clamp_min_(base.F32_TINY))
            worst = torch.maximum(worst, ratio.amax())
    relative = (error_sum / source_sum) ** 0.5 if source_sum else error_sum**0.5
    return ErrorReport(worst=worst.item(), relative=relative)


def _matrices(
    w: Tensor, tensors: Mapping[str, Tensor], input_major: bool
) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
    """Yield each [out, in] matrix of ``w`` and its tensors, rows first."""
    kept = {k: v for k, v in tensors.items() if k != "input_scale"}
    if w.ndim == 2:
        yield (
            _oriented(w, input_major),
            {k: _oriented(v, input_major) if v.ndim == 2 else v for k, v in kept.items()},
        )
        return
    for e in range(w.shape[0]):
        parts = {k: v[e] if v.ndim else v for k, v in kept.items()}
        yield from _matrices(w[e], parts, input_major)


def _oriented(t: Tensor, input_major: bool) -> Tensor:
    return t.transpose(-1, -2) if input_major else t


def _parts(shape: tuple[int, ...], stacked_input_major: bool) -> tuple[tuple[int, ...], int, int]:
    """Return (leading axes, output channels, input channels) of a shape."""
    *lead, out, columns = shape
    return (tuple(lead), columns, out) if stacked_input_major else (tuple(lead), out, columns)


def _shape_problem(shape: tuple[int, ...], stacked_input_major: bool) -> str | None:
    if len(shape) not in (2, 3):
        return f"shape {list(shape)} is neither a matrix nor a stack of matrices"
    lead, out, columns = _parts(shape, stacked_input_major)
    for letter, size in (*(("E", e) for e in lead), ("R", out), ("K", columns)):
        if size == 0:
            return f"{letter}=0: the matrix is empty"
    return None


def _finite(amax: Tensor, what: str) -> Tensor:
    finite = amax.isfinite()
    if not bool(finite.all()):
        bad = amax[~finite].reshape(-1)[0].item()
        raise NonFiniteError(
            f"{what} has the largest magnitude {bad}: it holds NaN or infinity; repair the source "
            "or leave the module unquantized"
        )
    return amax


def _given(input_scale: Tensor | None, name: str) -> Tensor:
    if input_scale is None:
        raise InternalError(f"{name} needs the input_scale of the calibration, got None")
    return input_scale
