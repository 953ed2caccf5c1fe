"""Weights in 4-bit E2M1 elements with block scales."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from modelopt_lite.formats import base, fp8, nvfp4
from modelopt_lite.formats.base import Numerics, TensorSpec
from modelopt_lite.formats.codecs.base import Codec, finite


@dataclass(frozen=True, kw_only=True)
class _NvFp4(Codec):
    """NVFP4: an E4M3 scale a block, a float32 scale a matrix or stack."""

    num_bits: int = 4
    bits: float = 4.5
    code_dtype: torch.dtype = torch.uint8
    block: int = nvfp4.BLOCK

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

    def quantize(self, w: Tensor, amax: Tensor | None, *, numerics: Numerics) -> dict[str, Tensor]:
        amax = finite(base.amax(w) if amax is None else amax, "a weight")
        scale_2 = nvfp4.weight_scale_2(amax, numerics=numerics)
        packed, scale = nvfp4.quantize(w, scale_2)
        return {"weight": packed, "weight_scale": scale, "weight_scale_2": scale_2}

    def dequantize(self, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        return nvfp4.dequantize(
            tensors["weight"], tensors["weight_scale"], tensors["weight_scale_2"], dtype
        )

    def max_error(self, w: Tensor, tensors: Mapping[str, Tensor], *, numerics: Numerics) -> Tensor:
        return nvfp4.error_bound(w, tensors["weight_scale_2"])


NVFP4 = _NvFp4()
