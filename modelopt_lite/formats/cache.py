"""The number formats of the key and value cache: their names, and what an export holds for them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any


@dataclass(frozen=True, slots=True)
class CacheFormat:
    """How keys and values are kept while text is generated.

    Attributes:
        name: The name in recipes.
        algo: The name in the exported configuration.
        scaled: The export has a scale for the keys and one for the values of each layer. Without,
            engines scale by 1.
        affine: The export also has a bias for each head and channel, subtracted before rounding.
        block: Channels of a head that share a scale, None without blocks.
    """

    name: str
    algo: str
    scaled: bool = True
    affine: bool = False
    block: int | None = None

    def problem(self, head_dim: int) -> str | None:
        """Return why heads of a size cannot be kept so, None if they can."""
        if self.block is not None and head_dim % self.block:
            return f"head_dim={head_dim} is not a multiple of {self.block}"
        return None


CACHE_FORMATS: Mapping[str, CacheFormat] = MappingProxyType(
    {
        f.name: f
        for f in (
            CacheFormat("fp8", "FP8"),
            CacheFormat("fp8_cast", "FP8", scaled=False),
            CacheFormat("fp8_affine", "FP8_AFFINE", affine=True),
            CacheFormat("nvfp4", "NVFP4", block=16),
            CacheFormat("nvfp4_cast", "NVFP4", scaled=False, block=16),
            CacheFormat("nvfp4_affine", "NVFP4_AFFINE", affine=True, block=16),
        )
    }
)
"""Every format of the cache by name."""


def stated_cache(section: Mapping[str, Any]) -> str | None:
    """Return what a ``quantization_config`` calls the format of the cache, upper case.

    compressed-tensors and the flat home of modelopt describe FP8 in numbers; other numbers come
    back as they are, and None where nothing is said.
    """
    stated = section.get("kv_cache_scheme") or section.get("kv_cache_quant_algo")
    if isinstance(stated, dict):
        return "FP8" if is_fp8(stated) and not stated.get("dynamic") else str(stated)
    return None if stated is None else str(stated).upper()


def is_fp8(scheme: Mapping[str, Any]) -> bool:
    """Whether numbers describe FP8, with whatever scales."""
    return scheme.get("type") == "float" and scheme.get("num_bits") == 8
