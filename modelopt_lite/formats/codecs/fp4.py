"""Weights in 4-bit E2M1 elements with block scales."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from modelopt_lite.formats import base, fp8, mxfp4, nvfp4
from modelopt_lite.formats.base import E2M1_MAX, E4M3_MAX, Numerics, TensorSpec
from modelopt_lite.formats.codecs.base import Codec, finite, stacked, unstacked


@dataclass(frozen=True, kw_only=True)
class _NvFp4(Codec):
    """NVFP4: an E4M3 scale a block, a float32 scale a matrix or stack.

    ``reach`` is the largest value of element times block scale. Engines that multiply the two in
    E4M3 want it within 448.
    """

    reach: float = E2M1_MAX * E4M3_MAX

    element: str = "nvfp4"
    num_bits: int = 4
    bits: float = 4.5
    code_dtype: torch.dtype = torch.uint8
    block: int = nvfp4.BLOCK
    takes_scale_amax: bool = True
    sweeps: bool = True

    @property
    def scale_limit(self) -> float:
        return self.reach / E2M1_MAX

    def shares_amax(self, rows: int, columns: int, numerics: Numerics) -> bool:
        return True

    def tensors(
        self, lead: tuple[int, ...], rows: int, columns: int, numerics: Numerics
    ) -> tuple[TensorSpec, ...]:
        return (
            TensorSpec("weight", torch.uint8, (*lead, rows, columns // 2)),
            TensorSpec("weight_scale", fp8.DTYPE, (*lead, rows, columns // self.block)),
            TensorSpec("weight_scale_2", torch.float32, ()),
        )

    def matrix_shape(self, codes: tuple[int, ...]) -> tuple[int, ...]:
        return (*codes[:-1], 2 * codes[-1])

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
        scale_2 = nvfp4.weight_scale_2(amax, numerics=numerics, reach=self.reach)
        scale = None
        if scale_amax is not None:
            scale = nvfp4.chosen_scales(scale_amax, amax, self.scale_limit)
        packed, scale = nvfp4.quantize(w, scale_2, self.block, scale)
        return {"weight": packed, "weight_scale": scale, "weight_scale_2": scale_2}

    def dequantize(self, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        scales = tensors["weight_scale"], tensors["weight_scale_2"]
        divisor = tensors.get(nvfp4.DIVISOR)
        return nvfp4.dequantize(tensors["weight"], *scales, dtype, self.block, divisor)

    def scale_amax(self, w: Tensor) -> Tensor:
        size = w.float().abs().contiguous().view(-1)
        return base.block_amax(size, self.block).view(*w.shape[:-1], -1)

    def max_error(self, w: Tensor, tensors: Mapping[str, Tensor], *, numerics: Numerics) -> Tensor:
        return nvfp4.error_bound(w, tensors["weight_scale_2"], self.block)

    def clipping_error(self, w: Tensor, tensors: Mapping[str, Tensor]) -> Tensor:
        scales = tensors["weight_scale"], tensors["weight_scale_2"]
        return nvfp4.clipping_bound(w, *scales, self.block)


@dataclass(frozen=True, kw_only=True)
class _MxFp4(Codec):
    """MXFP4: a power of two a block."""

    element: str = "mxfp4"
    num_bits: int = 4
    bits: float = 4.25
    code_dtype: torch.dtype = torch.uint8
    block: int = mxfp4.BLOCK
    stacks_as_stored: bool = True

    def tensors(
        self, lead: tuple[int, ...], rows: int, columns: int, numerics: Numerics
    ) -> tuple[TensorSpec, ...]:
        return (
            TensorSpec("weight", torch.uint8, (*lead, rows, columns // 2)),
            TensorSpec("weight_scale", torch.uint8, (*lead, rows, columns // self.block)),
        )

    def matrix_shape(self, codes: tuple[int, ...]) -> tuple[int, ...]:
        return (*codes[:-1], 2 * codes[-1])

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
        packed, scale = mxfp4.quantize(w, numerics=numerics)
        return {"weight": packed, "weight_scale": scale}

    def dequantize(self, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        if tensors["weight"].ndim == 3:
            return torch.stack([self.dequantize(part, dtype) for part in unstacked(tensors)])
        return mxfp4.dequantize(tensors["weight"], tensors["weight_scale"], dtype)

    def max_error(self, w: Tensor, tensors: Mapping[str, Tensor], *, numerics: Numerics) -> Tensor:
        return mxfp4.error_bound(w, tensors["weight_scale"])


NVFP4 = _NvFp4()
# Leaves block scales room to be 1.5 times as large, so that 4 and not 6 is a block's largest code.
NVFP4_FOR_FOUR_OVER_SIX = _NvFp4(reach=E2M1_MAX * 256, sweeps=False)
NVFP4_OF_32 = _NvFp4(block=32, bits=4.25, sweeps=False)
NVFP4_FOR_FP8 = _NvFp4(block=32, bits=4.25, reach=E4M3_MAX, sweeps=False, stacks_as_stored=True)
MXFP4 = _MxFp4()
