"""SVDQuant: keep the largest singular directions of a matrix apart, and round the rest.

A product becomes ``x' @ Q(W').T + (x' @ a.T) @ b.T`` with smoothed inputs x'.

Source: Li et al., SVDQuant, arXiv:2411.05007. Shape suffixes: R rows, K columns, L the rank.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from modelopt_lite.calibrate.algorithm import Algorithm, Choice, Choices, Each, Weight, here
from modelopt_lite.calibrate.awq import AWQLite
from modelopt_lite.calibrate.observe import Site
from modelopt_lite.calibrate.statistics import Kind
from modelopt_lite.formats.base import Numerics
from modelopt_lite.formats.linear import LinearFormat
from modelopt_lite.formats.smoothed import LORA_A, LORA_B


class SVDQuant(Algorithm):
    """AWQ's scales, then low-rank factors of what they gave, in the dtype of the matrix."""

    kinds: frozenset[Kind] = AWQLite.kinds
    replaces = True

    def __init__(self, numerics: Numerics, *, lowrank: int, alpha_step: float) -> None:
        super().__init__(numerics)
        self._rank = int(lowrank)
        self._lite = AWQLite(numerics, alpha_step=alpha_step)

    def row_limit(self, site: Site) -> int | None:
        """See `Algorithm`."""
        return self._lite.row_limit(site)

    def problem(self, fmt: LinearFormat) -> str | None:
        """See `Algorithm`."""
        return self._lite.problem(fmt)

    def scratch(self, rows: int, columns: int, seen: int) -> int:
        """See `Algorithm`: in float64 the matrix, its copy and its singular vectors."""
        return max(36 * rows * columns, self._lite.scratch(rows, columns, seen))

    def reads(self, fmt: LinearFormat) -> int:
        """See `Algorithm`."""
        return self._lite.reads(fmt) + 1

    def choose(self, weights: Sequence[Weight], each: Each = here) -> Choices:
        """See `Algorithm`."""
        choices = self._lite.choose(weights, each)
        together: dict[str, list[Weight]] = {}
        for weight in weights:
            if weight.own:
                together.setdefault(weight.together, []).append(weight)
        for members in together.values():
            if self.numerics == "modelopt":
                self._as_peer(members, choices)
                continue
            for weight in members:
                _apart(choices[weight.key], weight.read(), self._rank)
        return choices

    def _as_peer(self, weights: Sequence[Weight], choices: Choices) -> None:
        """Factors under a matrix's own scale; then one pair for all that engines fuse."""
        rests, lows = [], []
        for weight in weights:
            choice, value_RK = choices[weight.key], weight.read()
            value_RK = choice.steps[0](value_RK)
            b_RL, a_LK = factors(value_RK, self._rank)
            b_RL, a_LK = b_RL.to(value_RK.dtype), a_LK.to(value_RK.dtype)
            rests.append(value_RK - b_RL @ a_LK)
            lows.append((b_RL, a_LK))
            _set(choice, rests[-1], b_RL, a_LK)
            if weight.amax is not None and choice.own_scale is not None:
                choice.input_amax = (weight.amax * choice.own_scale).amax().float()
        if len(weights) == 1:
            return
        whole = []
        for weight, rest_RK, (b_RL, a_LK) in zip(weights, rests, lows, strict=True):
            choice = choices[weight.key]
            assert choice.own_scale is not None
            assert choice.pre_quant_scale is not None
            again = choice.own_scale.float() / choice.pre_quant_scale.float()
            whole.append((rest_RK.float() + b_RL.float() @ a_LK.float()) * again)
        rows = [len(part) for part in whole]
        joint_RK = torch.cat(whole)
        joint_b, joint_a = (t.float() for t in factors(joint_RK, self._rank))
        rest = (joint_RK - joint_b @ joint_a).to(rests[0].dtype)
        dtype = rests[0].dtype
        for weight, part, b in zip(weights, rest.split(rows), joint_b.split(rows), strict=True):
            _set(choices[weight.key], part, b.to(dtype), joint_a.to(dtype))


def factors(w_RK: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Return float64 ``b`` [R, L] and ``a`` [L, K], whose product is the nearest of that rank.

    Where the matrix has a smaller rank, what is left of them is 0.
    """
    u, s, v = torch.linalg.svd(w_RK.double(), full_matrices=False)
    found = min(rank, len(s))
    b_RL = u.new_zeros(len(w_RK), rank)
    a_LK = v.new_zeros(rank, w_RK.shape[1])
    b_RL[:, :found] = u[:, :found] * s[:found]
    a_LK[:found] = v[:found]
    return b_RL, a_LK


def _apart(choice: Choice, w_RK: Tensor, rank: int) -> None:
    """Take the factors out of a smoothed matrix, which is rounded once."""
    assert choice.pre_quant_scale is not None
    dtype = w_RK.dtype
    value_RK = w_RK.float() / choice.pre_quant_scale.float()
    b_RL, a_LK = (t.to(dtype) for t in factors(value_RK, rank))
    _set(choice, (value_RK - b_RL.float() @ a_LK.float()).to(dtype), b_RL, a_LK)


def _set(choice: Choice, rest_RK: Tensor, b_RL: Tensor, a_LK: Tensor) -> None:
    choice.steps = (lambda _: rest_RK,)
    choice.extras = {LORA_A: a_LK, LORA_B: b_RL}
