"""What an AutoQuantize recipe asks for: formats to choose from, and bits to spend."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from modelopt_lite.errors import RecipeError
from modelopt_lite.words import near

METHODS = ("gradient", "kl")


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoQuantize:
    """A choice of formats that a search makes.

    Attributes:
        formats: The formats to choose from; ``"none"`` leaves matrices as they are.
        effective_bits: The most bits a weight, scales included, over all matrices chosen for.
        method: How a choice is scored: "gradient", or "kl".
    """

    formats: tuple[str, ...]
    effective_bits: float
    method: str = "gradient"


def parse_auto(data: Any, *, where: str) -> AutoQuantize:
    """Check the value of ``auto_quantize`` in a recipe.

    Raises:
        RecipeError: A key or value that means nothing.
    """
    where = f"{where}: auto_quantize"
    if not isinstance(data, Mapping):
        raise RecipeError(f"{where} must have formats and effective_bits, got {data!r}")
    known = [field.name for field in fields(AutoQuantize)]
    for key in data:
        if key not in known:
            raise RecipeError(
                f"{where} has no key {key!r}{near(str(key), known)}; it has: {', '.join(known)}"
            )
    formats = data.get("formats")
    if not isinstance(formats, list) or not all(isinstance(name, str) for name in formats):
        raise RecipeError(f"{where}.formats must be a list of formats, got {formats!r}")
    if len(set(formats)) < max(2, len(formats)):
        raise RecipeError(f"{where}.formats must be two or more different ones, got {formats!r}")
    method = data.get("method", METHODS[0])
    if method not in METHODS:
        raise RecipeError(
            f"{where}.method must be {' or '.join(METHODS)}, got {method!r}"
            f"{near(str(method), METHODS)}"
        )
    bits = checked_bits(data.get("effective_bits"), f"{where}.effective_bits")
    return AutoQuantize(formats=tuple(formats), effective_bits=bits, method=method)


def checked_bits(bits: Any, what: str) -> float:
    """Return a number of bits a weight.

    Raises:
        RecipeError: It is none.
    """
    if isinstance(bits, bool) or not isinstance(bits, int | float) or not 0 < bits <= 32:
        raise RecipeError(f"{what} must be a number above 0 and at most 32, got {bits!r}")
    return float(bits)
