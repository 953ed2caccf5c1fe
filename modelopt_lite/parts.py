"""The tensors of the export that a matrix becomes: those of its format, and what stands beside."""

from __future__ import annotations

from functools import cache

import torch

from modelopt_lite.formats.base import Numerics, TensorSpec
from modelopt_lite.formats.linear import FORMATS
from modelopt_lite.formats.smoothed import FACTORS, LORA_A, LORA_B, PEER_PREFIX, PRE_QUANT_SCALE


@cache  # most matrices of a model are alike, and then share one tuple
def matrix_parts(
    name: str,
    shape: tuple[int, ...],
    input_major: bool,
    numerics: Numerics,
    kept: torch.dtype | None,
    rank: int,
) -> tuple[TensorSpec, ...]:
    """Return the tensors that a matrix or stack becomes.

    Args:
        name: Name of its format.
        shape: [R, K], or as on disk for stacked experts.
        input_major: It is a stack whose reduction axis comes first.
        numerics: ``modelopt`` takes Model Optimizer's names of factors.
        kept: Dtype of a scale of the channels of inputs that stays in the export; None: none does.
        rank: Of SVDQuant's factors, ``a`` [..., rank, K] and ``b`` [..., R, rank]; 0 without any.
    """
    specs = FORMATS[name].tensors(shape, stacked_input_major=input_major, numerics=numerics)
    if kept is None:
        return specs
    *lead, rows, width = (*shape[:-2], shape[-1], shape[-2]) if input_major else shape
    specs = (*specs, TensorSpec(PRE_QUANT_SCALE, kept, (width,)))
    if not rank:
        return specs
    prefix = PEER_PREFIX if numerics == "modelopt" else ""
    return (
        *specs,
        TensorSpec(f"{prefix}{LORA_A}", kept, (*lead, rank, width)),
        TensorSpec(f"{prefix}{LORA_B}", kept, (*lead, rows, rank)),
    )


def factor_of(suffix: str) -> str | None:
    """Return which of SVDQuant's factors a tensor of the export is; None for any other."""
    name = suffix.removeprefix(PEER_PREFIX)
    return name if name in FACTORS else None
