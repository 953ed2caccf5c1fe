"""GPTQ: round column by column, and let the columns that follow make up for each error.

Source: Frantar et al., GPTQ, arXiv:2210.17323. Shape suffixes: R rows, K columns, C columns of one
step, S elements that share a scale.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from modelopt_lite.calibrate.algorithm import Algorithm, Choice, Choices, Each, Weight, here
from modelopt_lite.calibrate.peer import integer_factor, round_to_steps
from modelopt_lite.calibrate.statistics import Kind
from modelopt_lite.formats import base, nvfp4
from modelopt_lite.formats.base import Numerics
from modelopt_lite.formats.linear import LinearFormat

RoundColumn = Callable[[Tensor, int], Tensor]


class GPTQ(Algorithm):
    """Chooses codes; scales are those of the largest magnitudes.

    Later layers are calibrated with what the rounded ones put out.
    """

    kinds: frozenset[Kind] = frozenset({"gram"})
    sequential = True
    replaces = True

    def __init__(self, numerics: Numerics, *, perc_damp: float, block_size: int) -> None:
        super().__init__(numerics)
        self._damp = perc_damp
        self._columns = block_size

    def problem(self, fmt: LinearFormat) -> str | None:
        """See `Algorithm`."""
        if fmt.codec.takes_scale_amax:
            return None
        return "GPTQ rounds to INT4, INT8 and NVFP4 under scales that stay as they are"

    def scratch(self, rows: int, columns: int, seen: int) -> int:
        """See `Algorithm`: the matrix twice; products of inputs, their factors and inverse."""
        return 8 * rows * columns + 16 * columns**2

    def reads(self, fmt: LinearFormat) -> int:
        """See `Algorithm`."""
        return 2

    def choose(self, weights: Sequence[Weight], each: Each = here) -> Choices:
        """See `Algorithm`."""
        shared: dict[str, Tensor] = {}
        for weight in weights:
            own = base.amax(weight.read())
            shared[weight.together] = torch.maximum(shared.get(weight.together, own), own)
        return {w.key: self._choice(w, shared[w.together]) for w in weights}

    def _choice(self, weight: Weight, amax: Tensor) -> Choice:
        w_RK, codec = weight.read(), weight.format.codec
        own = codec.scale_amax(w_RK)
        if weight.seen is None or weight.seen.gram is None:
            return Choice(scale_amax=own)
        size = w_RK.shape[1] if own.ndim == 1 else w_RK.shape[1] // own.shape[1]
        scales = own.view(len(w_RK), -1)
        if codec.kind == "float":
            scale_2 = nvfp4.weight_scale_2(amax, numerics=self.numerics, reach=codec.reach)
            step = nvfp4.chosen_scales(scales, amax, codec.scale_limit).float() * scale_2
        else:
            largest = 2.0 ** (codec.num_bits - 1) - 1
            step = integer_factor(scales, largest, exact=self.numerics == "exact")

        def rounded(w_R: Tensor, column: int) -> Tensor:
            step_R1 = step[:, column // size].unsqueeze(-1)
            if codec.kind == "float":
                return round_to_steps(w_R.unsqueeze(-1), step_R1).view(-1)
            code_R = (w_R * step_R1.view(-1)).round_().clamp_(-largest - 1, largest)
            return code_R / step_R1.view(-1)

        value_RK = w_RK.float().clone(memory_format=torch.contiguous_format)
        inverse_KK = inverse_factor(weight.seen.gram, value_RK, self._damp)
        round_columns_(value_RK, inverse_KK, rounded, self._columns)
        made_RK = value_RK.to(w_RK.dtype)
        return Choice(steps=(lambda _: made_RK,), scale_amax=own, replaces=True)


def inverse_factor(gram_KK: Tensor, w_RK: Tensor, damp: float) -> Tensor:
    """Return the upper Cholesky factor of the inverse of damped products of inputs, float32 [K, K].

    The identity, which spreads no error, where they are not positive definite.

    Args:
        gram_KK: float32, symmetric: the mean of ``2 * x * x.T``.
        w_RK: The weights; columns of zeros count as inputs that are never used.
        damp: Added to the diagonal, as a part of its mean.
    """
    products = gram_KK.clone()
    unused = (w_RK == 0).all(dim=0)
    products[unused, :] = 0
    products[:, unused] = 0
    diagonal = products.diagonal()
    diagonal[unused] = 1
    diagonal += damp * diagonal.mean()
    lower, failed = torch.linalg.cholesky_ex(products)
    if not bool(failed):
        upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
        if not bool(failed):
            return torch.as_tensor(upper)
    return torch.eye(len(products), dtype=products.dtype, device=products.device)


def round_columns_(w_RK: Tensor, inverse_KK: Tensor, rounded: RoundColumn, columns: int) -> None:
    """Round a matrix in place, and pass each column's error on to those behind it.

    Args:
        w_RK: float32, contiguous.
        inverse_KK: See `inverse_factor`.
        rounded: Rounds a column, given its values [R] and its index.
        columns: Errors go to the columns of a step at once, to those behind it after the step.
    """
    for start in range(0, w_RK.shape[1], columns):
        stop = min(start + columns, w_RK.shape[1])
        part_RC = w_RK[:, start:stop].clone()
        errors_RC = torch.zeros_like(part_RC)
        factor_CC = inverse_KK[start:stop, start:stop]
        for i in range(stop - start):
            before_R = part_RC[:, i]
            made_R = rounded(before_R.contiguous(), start + i)
            error_R = (before_R - made_R) / factor_CC[i, i]
            w_RK[:, start + i], errors_RC[:, i] = made_R, error_R
            part_RC[:, i:].addr_(error_R, factor_CC[i, i:], alpha=-1)
        w_RK[:, stop:].addmm_(errors_RC, inverse_KK[start:stop, stop:], alpha=-1)
