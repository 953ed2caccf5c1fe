"""What a codec of weights is. Every family of number formats has a file beside this one.

Shape letters: R rows (output channels), K columns (input channels); ``lead`` is () or (E,), the
axis of stacked experts. Blocks run along K.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from modelopt_lite.errors import NonFiniteError
from modelopt_lite.formats.base import Numerics, TensorSpec
from modelopt_lite.formats.base import amax as amax_of


@dataclass(frozen=True, kw_only=True)
class Codec(ABC):
    """How matrices [R, K] or stacks [E, R, K] are kept.

    Attributes:
        num_bits: Bits of a code.
        bits: Bits an element, block scales included.
        code_dtype: Of the tensor ``weight``.
        block: Elements along K that share a block scale, None without blocks.
        row_multiple: ``part`` takes rows that begin at a multiple of this,
        column_multiple: and ``tile`` columns that begin at a multiple of this; None: it takes all.
        kind: What codes are.
        element: Codecs of equal ones differ in their scales alone.
        stacks_as_stored: Under ``numerics="modelopt"`` blocks run along the last axis of a stack as
            it lies on disk, whichever axis that is.
        takes_scale_amax: What its scales stand for can be chosen.
        reach: Largest value of code times block scale, where there are two scales.
        any_block: ``block`` may be another number; see ``with_block``.
        sweeps: Its block scales are E4M3 numbers that can all be tried.
    """

    num_bits: int
    bits: float
    code_dtype: torch.dtype
    block: int | None = None
    row_multiple: int = 1
    column_multiple: int | None = None
    kind: Literal["float", "int"] = "float"
    element: str = ""
    stacks_as_stored: bool = False
    takes_scale_amax: bool = False
    any_block: bool = False
    sweeps: bool = False
    reach: float = 1.0

    @property
    def scale_limit(self) -> float:
        """The block scale of the block with the largest magnitude, where there are two scales."""
        return 1.0

    def with_block(self, block: int) -> Codec:
        """Return the codec with so many elements in a block, where ``any_block``."""
        raise NotImplementedError(f"{type(self).__name__}: blocks have one size")

    def problem(self, rows: int, columns: int) -> str | None:
        """Return why [rows, columns] cannot be kept, None if it can; both are at least 1."""
        if self.block is not None and columns % self.block:
            return f"K={columns} is not a multiple of {self.block}"
        return None

    def shares_amax(self, rows: int, columns: int, numerics: Numerics) -> bool:
        """Return whether matrices that engines fuse are quantized with their common amax."""
        return False

    @abstractmethod
    def tensors(
        self, lead: tuple[int, ...], rows: int, columns: int, numerics: Numerics
    ) -> tuple[TensorSpec, ...]:
        """Return weight, weight_scale and weight_scale_2, as many of them as there are."""

    def matrix_shape(self, codes: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of what codes of a shape stand for."""
        return codes

    @abstractmethod
    def quantize(
        self,
        w: Tensor,
        amax: Tensor | None,
        *,
        numerics: Numerics,
        scale_dtype: torch.dtype = torch.float32,
        scale_amax: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """Return the tensors by suffix; arguments as for ``LinearFormat.quantize``."""

    def scale_amax(self, w: Tensor) -> Tensor:
        """Return what each scale of a matrix [R, K] stands for by default, float32."""
        return amax_of(w)

    @abstractmethod
    def dequantize(self, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        """Return the values [..., R, K] of what ``quantize`` gave."""

    @abstractmethod
    def max_error(self, w: Tensor, tensors: Mapping[str, Tensor], *, numerics: Numerics) -> Tensor:
        """Return the largest float32 error of each element, of the shape of ``w``."""

    def clipping_error(self, w: Tensor, tensors: Mapping[str, Tensor]) -> Tensor:
        """Return the largest float32 error of each element of [R, K] under any scales.

        Half of the widest step, or what lies past the largest code; where ``takes_scale_amax``.
        """
        raise NotImplementedError(f"{type(self).__name__}: scales cannot be chosen")

    def part(self, tensors: Mapping[str, Tensor], rows: slice) -> dict[str, Tensor]:
        """Return the tensors of some rows of one matrix; see ``row_multiple``."""
        return {k: t[rows] if t.ndim else t for k, t in tensors.items()}

    def tile(self, tensors: Mapping[str, Tensor], rows: slice, columns: slice) -> dict[str, Tensor]:
        """Return the tensors of a part of one matrix; see ``row_multiple``, ``column_multiple``."""
        return self.part(tensors, rows)


def finite(amax: Tensor, what: str) -> Tensor:
    """Return an amax of any shape.

    Raises:
        NonFiniteError: It holds a NaN or an infinity.
    """
    good = amax.isfinite()
    if not bool(good.all()):
        bad = amax[~good].reshape(-1)[0].item()
        raise NonFiniteError(
            f"{what} has the largest magnitude {bad}: it holds NaN or infinity; repair the source "
            "or leave the module unquantized"
        )
    return amax


def stacked(parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Join the tensors of the matrices of a stack."""
    return {k: _stack([part[k] for part in parts]) for k in parts[0]}


def unstacked(tensors: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    """Take a stack's tensors apart; the reverse of `stacked`."""
    count = len(tensors["weight"])
    return [{k: t[e] if t.ndim else t for k, t in tensors.items()} for e in range(count)]


def _stack(parts: list[Tensor]) -> Tensor:
    if parts[0].dtype.itemsize > 1:
        return torch.stack(parts)
    return torch.stack([t.view(torch.uint8) for t in parts]).view(parts[0].dtype)
