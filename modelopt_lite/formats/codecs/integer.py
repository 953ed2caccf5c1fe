"""Weights in INT8 with a scale a row, and in INT4 with a scale a group of neighbours."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from modelopt_lite.formats import base, fp8, integer
from modelopt_lite.formats.base import Numerics, TensorSpec
from modelopt_lite.formats.codecs.base import Codec, finite, stacked, unstacked


@dataclass(frozen=True, kw_only=True)
class _Int8(Codec):
    """A float32 scale for each row."""

    element: str = "int8"
    num_bits: int = 8
    bits: float = 8.0
    code_dtype: torch.dtype = torch.int8
    kind: Literal["float", "int"] = "int"
    takes_scale_amax: bool = True

    def tensors(
        self, lead: tuple[int, ...], rows: int, columns: int, numerics: Numerics
    ) -> tuple[TensorSpec, ...]:
        return (
            TensorSpec("weight", torch.int8, (*lead, rows, columns)),
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
        if w.ndim == 3:
            parts = [None] * len(w) if scale_amax is None else scale_amax
            return stacked(
                [
                    self.quantize(
                        part, None, numerics=numerics, scale_dtype=scale_dtype, scale_amax=own
                    )
                    for part, own in zip(w, parts, strict=True)
                ]
            )
        own = base.row_amax(w) if scale_amax is None else scale_amax
        scale = integer.int8_scale(finite(own, "a weight"), numerics=numerics)
        scale = base.rounded_up(scale, scale_dtype)
        return {"weight": integer.quantize_int8(w, scale), "weight_scale": scale}

    def scale_amax(self, w: Tensor) -> Tensor:
        return base.row_amax(w)

    def dequantize(self, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        if tensors["weight"].ndim == 3:
            return torch.stack([self.dequantize(part, dtype) for part in unstacked(tensors)])
        return integer.dequantize_int8(tensors["weight"], tensors["weight_scale"], dtype)

    def max_error(self, w: Tensor, tensors: Mapping[str, Tensor], *, numerics: Numerics) -> Tensor:
        return integer.error_bound(w, tensors["weight_scale"].unsqueeze(-1))

    def clipping_error(self, w: Tensor, tensors: Mapping[str, Tensor]) -> Tensor:
        scale = tensors["weight_scale"].unsqueeze(-1)
        return integer.clipping_bound(w, scale, integer.INT8_MAX)


@dataclass(frozen=True, kw_only=True)
class _Int4(Codec):
    """Two rows to a byte, a float32 scale for ``block`` neighbours in a row."""

    element: str = "int4"
    num_bits: int = 4
    bits: float = 4 + 32 / integer.BLOCK
    code_dtype: torch.dtype = torch.uint8
    block: int = integer.BLOCK
    row_multiple: int = 2
    kind: Literal["float", "int"] = "int"
    takes_scale_amax: bool = True
    any_block: bool = True

    def with_block(self, block: int) -> Codec:
        return replace(self, block=block, bits=self.num_bits + 32 / block)

    def problem(self, rows: int, columns: int) -> str | None:
        if rows % 2:
            return f"R={rows} is odd, and two rows share a byte"
        return Codec.problem(self, rows, columns)

    def tensors(
        self, lead: tuple[int, ...], rows: int, columns: int, numerics: Numerics
    ) -> tuple[TensorSpec, ...]:
        return (
            TensorSpec("weight", torch.uint8, (*lead, rows // 2, columns)),
            TensorSpec("weight_scale", torch.float32, (*lead, rows, columns // self.block)),
        )

    def matrix_shape(self, codes: tuple[int, ...]) -> tuple[int, ...]:
        return (*codes[:-2], 2 * codes[-2], codes[-1])

    def scale_amax(self, w: Tensor) -> Tensor:
        return integer.block_amax(w, self.block)

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
            parts = [None] * len(w) if scale_amax is None else scale_amax
            return stacked(
                [
                    self.quantize(
                        part, None, numerics=numerics, scale_dtype=scale_dtype, scale_amax=own
                    )
                    for part, own in zip(w, parts, strict=True)
                ]
            )
        own = finite(self.scale_amax(w) if scale_amax is None else scale_amax, "a weight")
        scale = integer.scale_from_amax(own, largest=integer.INT4_MAX, numerics=numerics)
        scale = base.rounded_up(scale, scale_dtype)
        return {"weight": integer.quantize_int4(w, scale), "weight_scale": scale}

    def dequantize(self, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        if tensors["weight"].ndim == 3:
            return torch.stack([self.dequantize(part, dtype) for part in unstacked(tensors)])
        return integer.dequantize_int4(tensors["weight"], tensors["weight_scale"], dtype)

    def max_error(self, w: Tensor, tensors: Mapping[str, Tensor], *, numerics: Numerics) -> Tensor:
        scale = tensors["weight_scale"].repeat_interleave(self.block, dim=-1)
        return integer.error_bound(w, scale)

    def clipping_error(self, w: Tensor, tensors: Mapping[str, Tensor]) -> Tensor:
        scale = tensors["weight_scale"].repeat_interleave(self.block, dim=-1)
        return integer.clipping_bound(w, scale, integer.INT4_MAX)

    def part(self, tensors: Mapping[str, Tensor], rows: slice) -> dict[str, Tensor]:
        pairs = slice(rows.start // 2, rows.stop // 2)
        return {
            "weight": tensors["weight"][pairs],
            "weight_scale": tensors["weight_scale"][rows],
        }


@dataclass(frozen=True, kw_only=True)
class _Int4ForFp8(_Int4):
    """INT4 for kernels that multiply in FP8: they also keep the scale of an E4M3 matrix."""

    def shares_amax(self, rows: int, columns: int, numerics: Numerics) -> bool:
        return True

    def tensors(
        self, lead: tuple[int, ...], rows: int, columns: int, numerics: Numerics
    ) -> tuple[TensorSpec, ...]:
        specs = _Int4.tensors(self, lead, rows, columns, numerics)
        return (*specs, TensorSpec("weight_scale_2", torch.float32, ()))

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
        tensors = _Int4.quantize(
            self, w, None, numerics=numerics, scale_dtype=scale_dtype, scale_amax=scale_amax
        )
        tensors["weight_scale_2"] = fp8.scale_from_amax(amax, numerics=numerics)
        return tensors

    def part(self, tensors: Mapping[str, Tensor], rows: slice) -> dict[str, Tensor]:
        return {**_Int4.part(self, tensors, rows), "weight_scale_2": tensors["weight_scale_2"]}


INT8 = _Int8()
INT4 = _Int4()
INT4_FOR_FP8 = _Int4ForFp8()
