"""AWQ's clipping: smaller scales that clip the largest weights, where the products lose less.

Shape suffixes: R rows, K columns, B blocks in a row, S elements of a block, T rows of inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from modelopt_lite.calibrate.algorithm import Algorithm, Choice, Choices, Each, Step, Weight, here
from modelopt_lite.calibrate.awq import AWQLite
from modelopt_lite.calibrate.mse import shared_amax
from modelopt_lite.calibrate.observe import Site
from modelopt_lite.calibrate.peer import fake_quantize_as_peer, peer_problem
from modelopt_lite.calibrate.statistics import Kind, Seen
from modelopt_lite.formats.base import Numerics, row_chunks
from modelopt_lite.formats.linear import LinearFormat

_ROWS = 1024
_EXPERT_ROWS = 256


class AWQClip(Algorithm):
    """Searches by what to multiply largest magnitudes: of each INT4 block, or of an NVFP4 matrix.

    Block scales of NVFP4 follow from the blocks; what is clipped is what exceeds the largest of
    them. Matrices that share the scale of the whole are clipped as one.
    """

    kinds: frozenset[Kind] = frozenset({"rows"})

    def __init__(self, numerics: Numerics, *, min_clip_ratio: float, shrink_step: float) -> None:
        super().__init__(numerics)
        between = torch.arange(min_clip_ratio, 1.0, shrink_step).tolist()
        self._ratios = [*(round(ratio, 2) for ratio in between), 1.0]

    def row_limit(self, site: Site) -> int | None:
        """See `Algorithm`; Model Optimizer compares by all inputs."""
        if self.numerics == "modelopt":
            return None
        return _ROWS if site.expert is None else _EXPERT_ROWS

    def problem(self, fmt: LinearFormat) -> str | None:
        """See `Algorithm`."""
        codec = fmt.codec
        if not codec.takes_scale_amax or codec.block is None:
            return "it has neither INT4 blocks nor an NVFP4 scale of the whole to clip by"
        return peer_problem(fmt) if self.numerics == "modelopt" else None

    def scratch(self, rows: int, columns: int, seen: int) -> int:
        """See `Algorithm`: the matrix, rounded; inputs; products."""
        whole = 10 if self.numerics == "modelopt" else 5
        return whole * rows * columns + 6 * seen * columns + 4 * seen * rows

    def reads(self, fmt: LinearFormat) -> int:
        """See `Algorithm`."""
        return 1 if fmt.codec.kind == "int" or self.numerics == "modelopt" else 2

    def choose(self, weights: Sequence[Weight], each: Each = here) -> Choices:
        """See `Algorithm`."""
        by_scale: dict[str, list[Weight]] = {}
        for weight in weights:
            by_scale.setdefault(weight.together, []).append(weight)
        choices: Choices = {}
        for members in by_scale.values():
            if members[0].format.codec.kind == "int":
                choices.update((w.key, self._of_blocks(w)) for w in members)
            elif self.numerics == "modelopt":
                choices.update((w.key, self._as_peer(w)) for w in members)
            else:
                choices.update(self._together(members))
        return choices

    def _of_blocks(self, weight: Weight) -> Choice:
        """Clip each block of an INT4 matrix."""
        w_RK, codec = weight.read(), weight.format.codec
        own_RB = codec.scale_amax(w_RK)
        if weight.seen is None:
            return Choice(scale_amax=own_RB)
        hessian_BSS = block_products(torch.cat(weight.seen.rows), own_RB.shape[1])
        chosen = []
        for rows in row_chunks(w_RK, codec.row_multiple):
            part_RK, own = w_RK[rows], own_RB[rows]
            best, taken = torch.full_like(own, torch.inf), own.clone()
            for ratio in self._ratios:
                kept = codec.quantize(part_RK, None, numerics="exact", scale_amax=own * ratio)
                error_RK = codec.dequantize(kept, torch.float32).sub_(part_RK)
                loss = quadratic(error_RK.view(*own.shape, -1), hessian_BSS)
                taken = torch.where(loss < best, own * ratio, taken)
                best = torch.minimum(best, loss)
            chosen.append(taken)
        return Choice(scale_amax=torch.cat(chosen))

    def _as_peer(self, weight: Weight) -> Choice:
        """Clip one NVFP4 matrix as Model Optimizer does."""
        w_RK = weight.read()
        amax = w_RK.abs().amax()
        if weight.seen is None:
            return Choice(amax=amax.float())
        actual = [functional.linear(x_TK, w_RK) for x_TK in weight.seen.rows]
        losses = []
        for ratio in self._ratios:
            rounded_RK = fake_quantize_as_peer(w_RK, weight.format, amax * ratio)
            total = torch.zeros(())
            for x_TK, y_TR in zip(weight.seen.rows, actual, strict=True):
                out_TR = functional.linear(x_TK, rounded_RK)
                total += (out_TR - y_TR).float().pow(2).mean()
            losses.append(float(total))
        return Choice(amax=(amax * self._ratios[losses.index(min(losses))]).float())

    def _together(self, weights: Sequence[Weight]) -> Choices:
        """Clip NVFP4 matrices that share the scale of the whole by one ratio."""
        (amax,) = shared_amax(weights).values()
        losses = torch.zeros(len(self._ratios), dtype=torch.float64)
        for weight in weights:
            if weight.seen is None:
                continue
            w_RK, codec = weight.read(), weight.format.codec
            x_TK = torch.cat(weight.seen.rows).float()
            for number, ratio in enumerate(self._ratios):
                kept = codec.quantize(w_RK, amax * ratio, numerics="exact")
                error_RK = codec.dequantize(kept, torch.float32).sub_(w_RK)
                norm = torch.linalg.vector_norm(x_TK @ error_RK.T, dtype=torch.float64)
                losses[number] += (norm**2).cpu() * (weight.seen.count / len(x_TK))
        # Nothing seen: no clipping. Of equals, the one that clips least.
        best = len(losses) - 1 - int(losses.flip(0).argmin())
        return {weight.key: Choice(amax=amax * self._ratios[best]) for weight in weights}


class AWQFull(Algorithm):
    """AWQ's scales first, then its clipping of what they gave."""

    kinds: frozenset[Kind] = AWQLite.kinds | AWQClip.kinds

    def __init__(
        self, numerics: Numerics, *, alpha_step: float, min_clip_ratio: float, shrink_step: float
    ) -> None:
        super().__init__(numerics)
        self._lite = AWQLite(numerics, alpha_step=alpha_step)
        self._clip = AWQClip(numerics, min_clip_ratio=min_clip_ratio, shrink_step=shrink_step)

    def row_limit(self, site: Site) -> int | None:
        """See `Algorithm`."""
        return self._lite.row_limit(site)

    def problem(self, fmt: LinearFormat) -> str | None:
        """See `Algorithm`."""
        return self._clip.problem(fmt)

    def scratch(self, rows: int, columns: int, seen: int) -> int:
        """See `Algorithm`."""
        scratch = self._clip.scratch(rows, columns, seen)
        return max(self._lite.scratch(rows, columns, seen), scratch)

    def reads(self, fmt: LinearFormat) -> int:
        """See `Algorithm`."""
        return self._lite.reads(fmt) + self._clip.reads(fmt)

    def choose(self, weights: Sequence[Weight], each: Each = here) -> Choices:
        """See `Algorithm`."""
        choices = self._lite.choose(weights, each)
        clipped = self._clip.choose([_smoothed(w, choices[w.key]) for w in weights if w.own])
        for key, choice in clipped.items():
            choices[key].amax, choices[key].scale_amax = choice.amax, choice.scale_amax
        return choices


def _smoothed(weight: Weight, choice: Choice) -> Weight:
    """The matrix and its inputs under the scale of a choice."""
    seen, scale_K = weight.seen, choice.pre_quant_scale
    assert scale_K is not None
    if seen is not None:
        rows = [x_TK * scale_K for x_TK in seen.rows]
        seen = Seen(calls=seen.calls, count=seen.count, rows=rows, stride=seen.stride)
    return replace(weight, seen=seen, read=partial(_read, weight, choice.steps))


def _read(weight: Weight, steps: tuple[Step, ...]) -> Tensor:
    value = weight.read()
    for step in steps:
        value = step(value)
    return value


def block_products(x_TK: Tensor, blocks: int) -> Tensor:
    """Return ``x.T @ x`` within each block of columns, float32 [B, S, S]."""
    x_BTS = x_TK.float().view(len(x_TK), blocks, -1).transpose(0, 1)
    return x_BTS.transpose(1, 2) @ x_BTS


def quadratic(error_RBS: Tensor, hessian_BSS: Tensor) -> Tensor:
    """Return ``e @ H @ e`` of each block, float32 [R, B]."""
    error_BRS = error_RBS.transpose(0, 1)
    loss_BR: Tensor = torch.linalg.vecdot(error_BRS @ hessian_BSS, error_BRS)
    return loss_BR.T
