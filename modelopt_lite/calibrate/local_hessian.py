"""Choose NVFP4 block scales by the error of products, block by block.

Shape suffixes: R rows, K columns, B blocks in a row, S = 16 elements of a block.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from modelopt_lite.calibrate.algorithm import Algorithm, Choice, Choices, Each, Weight, here
from modelopt_lite.calibrate.clip import quadratic
from modelopt_lite.calibrate.mse import amax_of_scales, shared_amax
from modelopt_lite.calibrate.peer import round_to_steps, static_steps
from modelopt_lite.calibrate.statistics import Kind
from modelopt_lite.calibrate.sweep import best_block_scales, sweep_problem
from modelopt_lite.formats import fp8, nvfp4
from modelopt_lite.formats.base import E4M3_MAX, Numerics, row_chunks
from modelopt_lite.formats.linear import LinearFormat


class LocalHessian(Algorithm):
    """Tries all E4M3 scales of a block: ``e @ H @ e`` of its error e, H the inputs' mean products.

    That is the error of the products but for what blocks have in common. Model Optimizer takes the
    inputs of a model in which inputs are rounded already; exact ones say more of what is lost.
    """

    kinds: frozenset[Kind] = frozenset({"blocks"})

    def __init__(self, numerics: Numerics) -> None:
        super().__init__(numerics)
        self.rounded = numerics == "modelopt"

    def problem(self, fmt: LinearFormat) -> str | None:
        """See `Algorithm`."""
        return sweep_problem(fmt)

    def scratch(self, rows: int, columns: int, seen: int) -> int:
        """See `Algorithm`: scales as codes and as magnitudes, and products of inputs, divided."""
        return rows * columns // 16 * 6 + 4 * 16 * columns

    def reads(self, fmt: LinearFormat) -> int:
        """See `Algorithm`."""
        return 2

    def choose(self, weights: Sequence[Weight], each: Each = here) -> Choices:
        """See `Algorithm`."""
        shared = shared_amax(weights)
        choices = {}
        for weight in weights:
            amax, w_RK = shared[weight.together], weight.read()
            scale_2 = nvfp4.weight_scale_2(amax, numerics=self.numerics)
            if weight.seen is None or weight.seen.blocks is None:
                scale_RB = best_block_scales(w_RK, scale_2)
            else:
                hessian_BSS = weight.seen.blocks / weight.seen.count
                if self.numerics == "modelopt":
                    scale_RB = best_scales_as_peer(w_RK, amax, hessian_BSS)
                else:
                    scale_RB = best_scales_for_products(w_RK, scale_2, hessian_BSS)
            choices[weight.key] = Choice(scale_amax=amax_of_scales(scale_RB, amax))
        return choices


def best_scales_for_products(w_RK: Tensor, scale_2: Tensor, hessian_BSS: Tensor) -> Tensor:
    """Return the scale of each block under which products lose least, the least of equals.

    Args:
        w_RK: [R, K], K a multiple of 16, finite.
        scale_2: float32 [] > 0, the scale of the matrix.
        hessian_BSS: float32, positive semidefinite: the mean of ``x * x.T`` of blocks of inputs.

    Returns:
        float8_e4m3fn [R, B].
    """
    codes = torch.arange(1, 127, dtype=torch.uint8, device=w_RK.device)
    steps = codes.view(fp8.DTYPE).float() * scale_2
    best_codes = torch.ones((len(w_RK), len(hessian_BSS)), dtype=torch.uint8, device=w_RK.device)
    for rows in row_chunks(w_RK):
        # A matrix of a stack [E, in, out] is a transposed view; the products must not depend on it.
        w_NS = w_RK[rows].float().contiguous().view(-1, nvfp4.BLOCK)
        best = torch.full_like(best_codes[rows], torch.inf, dtype=torch.float32)
        for code, step in zip(codes, steps, strict=True):
            error_NS = round_to_steps(w_NS, step).sub_(w_NS)
            loss = quadratic(error_NS.view(*best.shape, nvfp4.BLOCK), hessian_BSS)
            best_codes[rows] = torch.where(loss < best, code, best_codes[rows])
            best = torch.minimum(best, loss)
    return best_codes.view(fp8.DTYPE)


def best_scales_as_peer(w_RK: Tensor, amax: Tensor, hessian_BSS: Tensor) -> Tensor:
    """Return what `best_scales_for_products` does, by Model Optimizer's steps and order of sums.

    Scales often lose equally much, and the last bit of a loss then decides. So the products are
    those of the whole matrix: their sums are in another order where it is cut into rows.

    Args:
        w_RK: As there.
        amax: float32 [], the largest magnitude of all matrices that share a scale.
        hessian_BSS: As there.
    """
    w_NS = w_RK.float().contiguous().view(-1, nvfp4.BLOCK)
    codes = torch.arange(1, 127, dtype=torch.uint8, device=w_RK.device)
    best_codes = torch.ones((len(w_RK), len(hessian_BSS)), dtype=torch.uint8, device=w_RK.device)
    best = torch.full(best_codes.shape, torch.inf, device=w_RK.device)
    for code, part in zip(codes, codes.view(fp8.DTYPE).float() / E4M3_MAX, strict=True):
        step = static_steps(amax * part, amax, E4M3_MAX)
        error_RBS = (w_NS - round_to_steps(w_NS, step)).view(*best.shape, nvfp4.BLOCK)
        loss = torch.einsum("rbs,bst,rbt->rb", error_RBS, hessian_BSS, error_RBS)
        best_codes = torch.where(loss < best, code, best_codes)
        best = torch.minimum(best, loss)
    return best_codes.view(fp8.DTYPE)
