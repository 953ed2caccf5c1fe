"""The dialects by name, and the one that a folder is written in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from modelopt_lite.dialects.base import Dialect
from modelopt_lite.dialects.compressed_tensors import CompressedTensors
from modelopt_lite.dialects.modelopt import ModelOpt
from modelopt_lite.errors import RecipeError
from modelopt_lite.words import near

DIALECTS: dict[str, type[Dialect]] = {kind.name: kind for kind in (ModelOpt, CompressedTensors)}
BOTH = "both"


def dialect_names(asked: str | Sequence[str]) -> tuple[str, ...]:
    """Return the names of the dialects that are asked for: one, several, or "both".

    Raises:
        RecipeError: A name that is none, one given twice, or no name at all.
    """
    names = (asked,) if isinstance(asked, str) else tuple(asked)
    if names == (BOTH,):
        names = tuple(DIALECTS)
    for name in names:
        if name not in DIALECTS:
            known = (*DIALECTS, BOTH)
            raise RecipeError(
                f"unknown dialect {name!r}{near(str(name), known)}; known: {', '.join(known)}"
            )
    if len(set(names)) != len(names) or not names:
        raise RecipeError(f"dialect is {asked!r}; give each dialect once, and at least one")
    return names


def make_dialect(name: str, model_dtype: torch.dtype) -> Dialect:
    """Return a dialect for an export of a model that runs in a dtype."""
    return DIALECTS[name](model_dtype)


def dialect_of(section: Mapping[str, Any], model_dtype: torch.dtype) -> Dialect:
    """Return the dialect of a ``quantization_config``; modelopt where it names no other."""
    method = str(section.get("quant_method"))
    return make_dialect(method if method in DIALECTS else ModelOpt.name, model_dtype)
