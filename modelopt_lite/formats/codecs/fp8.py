"""Weights in FP8 E4M3, with a float32 scale a matrix, row or block, or a power of two (MXFP8)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from modelopt_lite.formats import base, fp8, fp8_block, mxfp4, mxfp8
from modelopt_lite.formats.base import Numerics, TensorSpec
from modelopt_lite.formats.codecs.base import Codec, finite, stacked, unstacked


@dataclass(frozen=True, kw_only=True)
class _PerTensor(Codec):
    """One float32 scale for a matrix or stack."""

    element: str = "fp8"
    num_bits: int = 8
    bits: float = 8.0
    code_dtype: torch.dtype = fp8.DTYPE

    def shares_amax(self, rows: int, columns: int, numerics: Numerics) -> bool:
        return True

    def tensors(
        self, lead: tuple[int, ...], rows: int, columns: int, numerics: Numerics
    ) -> tuple[TensorSpec, ...]:
        return (
            TensorSpec("weight", fp8.DTYPE, (*lead, rows, columns)),
            TensorSpec("weight_scale", torch.float32, ()),
        )

    def quantize(
        self,
        w: Tensor,
        amax: Tensor | None,
        *,
        numerics: Numerics,
        scale_dtype: torch.dtype = torch.float32,
        scale_amax: Tensor | None = None,
    ) -> dict[str, Tensor]:
        amax = finite(base.amax(w) if amax is None else amax, "a weight")
        scale = base.rounded_up(fp8.scale_from_amax(amax, numerics=numerics), scale_dtype)
        return {"weight": _quantize(w, _of(w, scale), numerics), "weight_scale": scale}

    def dequantize(self, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        return fp8.dequantize(tensors["weight"], tensors["weight_scale"], dtype)

    def max_error(self, w: Tensor, tensors: Mapping[str, Tensor], *, numerics: Numerics) -> Tensor:
        return fp8.error_bound(w, _of(w, tensors["weight_scale"]), numerics=numerics)


@dataclass(frozen=True, kw_only=True)
class _PerRow(Codec):
    """A float32 scale for each row."""

    element: str = "fp8 by row"
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

    def quantize(
        self,
        w: Tensor,
        amax: Tensor | None,
        *,
        numerics: Numerics,
        scale_dtype: torch.dtype = torch.float32,
        scale_amax: Tensor | None = None,
    ) -> dict[str, Tensor]:
        scale = fp8.scale_from_amax(finite(base.row_amax(w), "a weight"), numerics=numerics)
        scale = base.rounded_up(scale, scale_dtype)
        return {"weight": _quantize(w, scale, numerics), "weight_scale": scale}

    def dequantize(self, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        return fp8.dequantize(tensors["weight"], tensors["weight_scale"], dtype)

    def max_error(self, w: Tensor, tensors: Mapping[str, Tensor], *, numerics: Numerics) -> Tensor:
        return fp8.error_bound(w, tensors["weight_scale"], numerics=numerics)


@dataclass(frozen=True, kw_only=True)
class _Blocks(Codec):
    """A float32 scale for each block of 128 x 128.

    On disk the scales of a matrix are [G, 1, H, 1], those of a stack [E, G, H]. The peer treats the
    scale of a single block as that of a matrix: it is a scalar, and fused matrices share it.
    """

    element: str = "fp8 by block"
    num_bits: int = 8
    bits: float = 8.0
    code_dtype: torch.dtype = fp8.DTYPE
    block: int = fp8_block.BLOCK
    row_multiple: int = fp8_block.BLOCK
    column_multiple: int | None = fp8_block.BLOCK

    def shares_amax(self, rows: int, columns: int, numerics: Numerics) -> bool:
        return numerics == "modelopt" and fp8_block.grid_shape(rows, columns) == (1, 1)

    def tensors(
        self, lead: tuple[int, ...], rows: int, columns: int, numerics: Numerics
    ) -> tuple[TensorSpec, ...]:
        g, h = fp8_block.grid_shape(rows, columns)
        scale = (*lead, g, h) if lead else (g, 1, h, 1)
        if not lead and self.shares_amax(rows, columns, numerics):
            scale = ()
        return (
            TensorSpec("weight", fp8.DTYPE, (*lead, rows, columns)),
            TensorSpec("weight_scale", torch.float32, scale),
        )

    def quantize(
        self,
        w: Tensor,
        amax: Tensor | None,
        *,
        numerics: Numerics,
        scale_dtype: torch.dtype = torch.float32,
        scale_amax: Tensor | None = None,
    ) -> dict[str, Tensor]:
        if w.ndim == 3:
            parts = stacked(
                [self.quantize(part, None, numerics="exact", scale_dtype=scale_dtype) for part in w]
            )
            return {**parts, "weight_scale": parts["weight_scale"][:, :, 0, :, 0]}
        amax_GH = fp8_block.block_amax(w)
        if amax is not None and self.shares_amax(len(w), w.shape[1], numerics):
            amax_GH = amax.view(1, 1)
        scale = fp8.scale_from_amax(finite(amax_GH, "a weight"), numerics=numerics)
        scale = base.rounded_up(scale, scale_dtype)
        weight = fp8_block.quantize(w, scale, numerics=numerics)
        _, spec = self.tensors((), len(w), w.shape[1], numerics)
        return {"weight": weight, "weight_scale": scale.view(spec.shape)}

    def dequantize(self, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        weight, scale = tensors["weight"], tensors["weight_scale"]
        if weight.ndim == 3:
            return torch.stack([self.dequantize(part, dtype) for part in unstacked(tensors)])
        return fp8_block.dequantize(weight, _grid(weight, scale), dtype=dtype)

    def max_error(self, w: Tensor, tensors: Mapping[str, Tensor], *, numerics: Numerics) -> Tensor:
        scale = tensors["weight_scale"]
        if w.ndim == 3:
            pairs = zip(w, scale, strict=True)
            return torch.stack([fp8_block.error_bound(part, s) for part, s in pairs])
        return fp8_block.error_bound(w, _grid(w, scale))

    def part(self, tensors: Mapping[str, Tensor], rows: slice) -> dict[str, Tensor]:
        scale = tensors["weight_scale"]
        return {
            "weight": tensors["weight"][rows],
            "weight_scale": scale[self._blocks(rows)] if scale.ndim else scale,
        }

    def tile(self, tensors: Mapping[str, Tensor], rows: slice, columns: slice) -> dict[str, Tensor]:
        part = self.part(tensors, rows)
        weight, scale = part["weight"], part["weight_scale"]
        if scale.ndim:
            scale = _grid(weight, scale)[:, self._blocks(columns)]
        return {"weight": weight[:, columns], "weight_scale": scale}

    def _blocks(self, part: slice) -> slice:
        return slice(part.start // self.block, -(-part.stop // self.block))


@dataclass(frozen=True, kw_only=True)
class _MxFp8(Codec):
    """MXFP8: a power of two for 32 neighbours in a row."""

    element: str = "mxfp8"
    num_bits: int = 8
    bits: float = 8.25
    code_dtype: torch.dtype = fp8.DTYPE
    block: int = mxfp4.BLOCK
    stacks_as_stored: bool = True

    def tensors(
        self, lead: tuple[int, ...], rows: int, columns: int, numerics: Numerics
    ) -> tuple[TensorSpec, ...]:
        return (
            TensorSpec("weight", fp8.DTYPE, (*lead, rows, columns)),
            TensorSpec("weight_scale", torch.uint8, (*lead, rows, columns // self.block)),
        )

    def quantize(
        self,
        w: Tensor,
        amax: Tensor | None,
        *,
        numerics: Numerics,
        scale_dtype: torch.dtype = torch.float32,
        scale_amax: Tensor | None = None,
    ) -> dict[str, Tensor]:
        if w.ndim == 3:
            return stacked([self.quantize(part, None, numerics=numerics) for part in w])
        finite(base.amax(w) if amax is None else amax, "a weight")
        codes, scale = mxfp8.quantize(w, numerics=numerics)
        return {"weight": codes, "weight_scale": scale}

    def dequantize(self, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        if tensors["weight"].ndim == 3:
            return torch.stack([self.dequantize(part, dtype) for part in unstacked(tensors)])
        return mxfp8.dequantize(tensors["weight"], tensors["weight_scale"], dtype)

    def max_error(self, w: Tensor, tensors: Mapping[str, Tensor], *, numerics: Numerics) -> Tensor:
        return mxfp8.error_bound(w, tensors["weight_scale"])


def _grid(w_RK: Tensor, scale: Tensor) -> Tensor:
    return scale.reshape(fp8_block.grid_shape(len(w_RK), w_RK.shape[1]))


def _of(w: Tensor, scale: Tensor) -> Tensor:
    """A stack's scale has axes in the peer, too, so that its quotient stays float32."""
    return scale.view(1, 1, 1) if w.ndim == 3 else scale


def _quantize(w: Tensor, scale: Tensor, numerics: Numerics) -> Tensor:
    # Of the strides of w: codes of a transposed stack are then contiguous when turned back.
    out = torch.empty_like(w, dtype=fp8.DTYPE)
    return fp8.quantize(w, scale, numerics=numerics, out=out)


PER_TENSOR = _PerTensor()
PER_ROW = _PerRow()
BLOCKS = _Blocks()
MXFP8 = _MxFp8()
