"""The number formats of the key and value cache: their names, and what an export holds for them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from modelopt_lite.formats import fp8, nvfp4
from modelopt_lite.formats.base import E2M1_MAX


@dataclass(frozen=True, slots=True)
class CacheFormat:
    """How keys and values are kept while text is generated.

    Attributes:
        name: The name in recipes.
        algo: The name in the exported configuration.
        scaled: The export has a scale for the keys and one for the values of each layer. Without,
            engines scale by 1.
        affine: The export also has a bias for each head and channel, subtracted before rounding.
    """

    name: str
    algo: str
    scaled: bool = True
    affine: bool = False

    def fake_quantize(self, x: Tensor, scale: Tensor | None, bias: Tensor | None = None) -> Tensor:
        """Return keys or values as the cache gives them back, in their dtype.

        Args:
            x: [B, heads, T, head_dim].
            scale: float32 [], the largest magnitude over 448; None to scale by 1. In NVFP4, whose
                largest code is 6, the scale of the whole is a sixth of it.
            bias: [1, heads, 1, head_dim], of the affine formats: subtracted before, added behind.

        Raises:
            ShapeError: NVFP4, and head_dim is no multiple of 16.
        """
        if bias is not None:
            centred = x.float() - bias.float()
            return (self.fake_quantize(centred, scale) + bias.float()).to(x.dtype)
        if self.algo.startswith("NVFP4"):
            one = x.new_ones((), dtype=torch.float32)
            return nvfp4.fake_quantize(x, one if scale is None else scale / E2M1_MAX)
        return fp8.fake_quantize(x, x.new_ones((), dtype=torch.float32) if scale is None else scale)


CACHE_FORMATS: Mapping[str, CacheFormat] = MappingProxyType(
    {
        f.name: f
        for f in (
            CacheFormat("fp8", "FP8"),
            CacheFormat("fp8_cast", "FP8", scaled=False),
            CacheFormat("fp8_affine", "FP8_AFFINE", affine=True),
            CacheFormat("nvfp4", "NVFP4"),
            CacheFormat("nvfp4_cast", "NVFP4", scaled=False),
            CacheFormat("nvfp4_affine", "NVFP4_AFFINE", affine=True),
        )
    }
)
"""Every format of the cache by name."""


def stated_cache(section: Mapping[str, Any]) -> str | None:
    """Return what a ``quantization_config`` calls the format of the cache, upper case.

    compressed-tensors and the flat home of modelopt describe FP8 in numbers; other numbers come
    back as they are, and None where nothing is said.
    """
    stated = section.get("kv_cache_scheme", section.get("kv_cache_quant_algo"))
    if isinstance(stated, dict):
        eight = stated.get("type") == "float" and stated.get("num_bits") == 8
        return "FP8" if eight else str(stated)
    return None if stated is None else str(stated).upper()
