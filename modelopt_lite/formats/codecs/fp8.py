"""Weights in FP8 E4M3, with one scale a matrix or one a row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from modelopt_lite.formats import base, fp8
from modelopt_lite.formats.base import Numerics, TensorSpec
from modelopt_lite.formats.codecs.base import Codec, finite


@dataclass(frozen=True, kw_only=True)
class _PerTensor(Codec):
    """One float32 scale for a matrix or stack."""

    num_bits: int = 8
    bits: float = 8.0
    code_dtype: torch.dtype = fp8.DTYPE
    shares_amax: bool = True

    def tensors(
        self, lead: tuple[int, ...], rows: int, columns: int, numerics: Numerics
    ) -> tuple[TensorSpec, ...]:
        return (
            TensorSpec("weight", fp8.DTYPE, (*lead, rows, columns)),
            TensorSpec("weight_scale", torch.float32, ()),
        )

    def quantize(self, w: Tensor, amax: Tensor | None, *, numerics: Numerics) -> dict[str, Tensor]:
        amax = finite(base.amax(w) if amax is None else amax, "a weight")
        scale = fp8.scale_from_amax(amax, numerics=numerics)
        return {"weight": _quantize(w, _of(w, scale), numerics), "weight_scale": scale}

    def dequantize(self, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        return fp8.dequantize(tensors["weight"], tensors["weight_scale"], dtype)

    def max_error(self, w: Tensor, tensors: Mapping[str, Tensor], *, numerics: Numerics) -> Tensor:
        return fp8.error_bound(w, _of(w, tensors["weight_scale"]), numerics=numerics)


@dataclass(frozen=True, kw_only=True)
class _PerRow(Codec):
    """A float32 scale for each row."""

    num_bits: int = 8
    bits: float = 8.0
    code_dtype: torch.dtype = fp8.DTYPE

    def tensors(
        self, lead: tuple[int, ...], rows: int, columns: int, numerics: Numerics
    ) -> tuple[TensorSpec, ...]:
        return (
            TensorSpec("weight", fp8.DTYPE, (*lead, rows, columns)),
            TensorSpec("weight_scale", torch.float32, (*lead, rows)),
        )

    def quantize(self, w: Tensor, amax: Tensor | None, *, numerics: Numerics) -> dict[str, Tensor]:
        scale = fp8.scale_from_amax(finite(base.row_amax(w), "a weight"), numerics=numerics)
        return {"weight": _quantize(w, scale, numerics), "weight_scale": scale}

    def dequantize(self, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        return fp8.dequantize(tensors["weight"], tensors["weight_scale"], dtype)

    def max_error(self, w: Tensor, tensors: Mapping[str, Tensor], *, numerics: Numerics) -> Tensor:
        return fp8.error_bound(w, tensors["weight_scale"], numerics=numerics)


def _of(w: Tensor, scale: Tensor) -> Tensor:
    """A stack's scale has axes in the peer, too, so that its quotient stays float32."""
    return scale.view(1, 1, 1) if w.ndim == 3 else scale


def _quantize(w: Tensor, scale: Tensor, numerics: Numerics) -> Tensor:
    # Of the strides of w: codes of a transposed stack are then contiguous when turned back.
    out = torch.empty_like(w, dtype=fp8.DTYPE)
    return fp8.quantize(w, scale, numerics=numerics, out=out)


PER_TENSOR = _PerTensor()
PER_ROW = _PerRow()
