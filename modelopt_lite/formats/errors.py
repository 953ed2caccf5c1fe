"""How far quantized values lie from their source, added up a few rows at a time."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from modelopt_lite.formats.base import F32_TINY, sum_of_squares


@dataclass(frozen=True, slots=True)
class ErrorReport:
    """How far quantized values lie from their source."""

    worst: float
    """Largest ``|error| / max_error``; a right export has at most 1. NaN where a value is NaN, 0
    where the format has no known bound."""
    relative: float
    """Root of the summed squared errors over the root of the summed squares; 0 for all zeros."""
    cosine: float = math.nan
    """Of the angle between source and quantized values, 1 where both are zero; NaN: not asked."""

    @property
    def sqnr(self) -> float:
        """Signal over quantization noise in decibels; infinite without an error."""
        return decibels(self.relative)


def decibels(relative: float) -> float:
    """Return signal over noise of a relative error, in decibels; infinite for none."""
    return -20 * math.log10(relative) if relative else math.inf


class ErrorSums:
    """What an `ErrorReport` is made of.

    Args:
        angle: Measure the cosine, too, for which every value is multiplied once more.
    """

    def __init__(self, *, angle: bool) -> None:
        self._angle = angle
        self._worst: Tensor | None = None
        self._errors = self._sources = self._values = self._products = 0.0

    def add(self, source: Tensor, value: Tensor, bound: Tensor | None = None) -> None:
        """Take up a part of a matrix.

        Args:
            source: float32, any shape.
            value: What it has become, alike; overwritten.
            bound: How far each value may be off, alike, overwritten; None: nothing is known of it.
        """
        if self._angle:
            self._values += sum_of_squares(value)
            self._products += float((value.double() * source).sum())
        self._sources += sum_of_squares(source)
        error = value.sub_(source).abs_()
        self._errors += sum_of_squares(error)
        if bound is not None:
            # The smallest divisor keeps 0 / 0 at 0 and lets any error where none is due stand out.
            worst = error.div_(bound.clamp_min_(F32_TINY)).amax()
            self._worst = worst if self._worst is None else torch.maximum(self._worst, worst)

    def report(self) -> ErrorReport:
        """Return what was found."""
        worst = 0.0 if self._worst is None else self._worst.item()
        relative = self._errors**0.5
        if self._sources:
            relative = (self._errors / self._sources) ** 0.5
        cosine = math.nan
        if self._angle:
            norms = self._sources**0.5 * self._values**0.5
            cosine = self._products / norms if norms else float(self._sources == self._values)
        return ErrorReport(math.nan if math.isnan(self._errors) else worst, relative, cosine)
