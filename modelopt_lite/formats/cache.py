"""The number formats of the key and value cache: their names, and what an export holds for them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


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
