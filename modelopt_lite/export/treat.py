"""Apply what an algorithm chose for the matrices of a layer, before they are quantized."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from graphlib import TopologicalSorter

import torch
from torch import Tensor

from modelopt_lite.calibrate.algorithm import Algorithm, Choice, Choices, Each, Weight, here
from modelopt_lite.calibrate.statistics import Statistics
from modelopt_lite.export.inputs import sites_of
from modelopt_lite.formats.linear import FORMATS
from modelopt_lite.formats.smoothed import PRE_QUANT_SCALE
from modelopt_lite.parts import factor_of
from modelopt_lite.plan import Matrix, Plan
from modelopt_lite.readers import Fold

Values = Callable[[Matrix], Tensor]


@dataclass(frozen=True, slots=True)
class Sharing:
    """How several processes choose what becomes of a layer's matrices.

    Attributes:
        rank: This process.
        owner: Which one has a matrix's values, and the rows that entered it.
        each: See `Algorithm`; every process calls it for groups whose matrices have several owners.
    """

    rank: int
    owner: Callable[[Matrix], int]
    each: Each

    def own(self, matrix: Matrix) -> bool:
        """Whether this process has a matrix."""
        return self.owner(matrix) == self.rank


def _at_hand(matrix: Matrix) -> bool:
    return True


class Treated:
    """What becomes of the matrices and other tensors of one layer.

    Args:
        plan: Says what reads the same tensor, and where scales are folded.
        algorithm: Chooses.
        matrices: All matrices of the layer.
        values: Returns a matrix as [R, K], or a stack as on disk.
        statistics: What entered the matrices.
        shared: How several processes choose together; None for one.
    """

    def __init__(
        self,
        plan: Plan,
        algorithm: Algorithm,
        matrices: Sequence[Matrix],
        values: Values,
        statistics: Statistics,
        shared: Sharing | None = None,
    ) -> None:
        self._plan = plan
        self._choices: Choices = {}
        self._scales: dict[str, Tensor] = {}
        groups: dict[str, list[Matrix]] = {}
        for matrix in matrices:
            groups.setdefault(matrix.reads, []).append(matrix)
        peers = _amax_of_experts(matrices, statistics) if plan.numerics == "modelopt" else {}
        self._reads = {m.name: m.reads for m in matrices}
        smooths = plan.recipe.algorithm.smooths  # then a group has one scale, and no problems
        # Rows that take up a scale are searched as they will be, so that scale comes before.
        searched = self._with_rows(values) if plan.numerics == "exact" else values
        for group in _in_order(groups, plan.rows, self._reads):
            owners = {shared.owner(m) for m in groups[group]} if shared is not None else set()
            if shared is not None and len(owners) == 1 and shared.rank not in owners:
                continue  # another's alone
            own = shared.own if shared is not None else _at_hand
            weights = [
                replace(w, own=own(m))
                for m in groups[group]
                for w in _weights(m, searched, statistics, peers)
            ]
            left = [w.key for w in weights if not smooths and algorithm.problem(w.format)]
            each = shared.each if shared is not None and len(owners) > 1 else here
            choices = algorithm.choose([w for w in weights if w.key not in left], each)
            choices.update((key, Choice()) for key in left)
            self._choices.update(choices)
            scale = choices[weights[0].key].pre_quant_scale
            if scale is not None:
                self._scales[group] = scale

    def weight(self, matrix: Matrix, value: Tensor) -> Tensor:
        """Return a matrix [R, K], or a stack as on disk, as it is quantized."""
        if value.ndim == 2:
            return self._applied(matrix.name, None, value)
        parts = [
            self._applied(matrix.name, e, part.mT if matrix.input_major else part)
            for e, part in enumerate(value)
        ]
        return torch.stack([part.mT if matrix.input_major else part for part in parts])

    def scale_amax(self, matrix: Matrix) -> Tensor | None:
        """Return what each scale stands for, where that was chosen; see ``LinearFormat``."""
        found = [self._choices[key].scale_amax for key in self._keys(matrix)]
        chosen = [amax for amax in found if amax is not None]
        if not chosen:
            return None
        return chosen[0] if len(matrix.shape) == 2 else torch.stack(chosen)

    def amax(self, matrix: Matrix) -> Tensor | None:
        """Return what the scale of the whole stands for, where that was chosen."""
        found = [self._choices[key].amax for key in self._keys(matrix)]
        chosen = [amax for amax in found if amax is not None]
        return torch.stack(chosen).max() if chosen else None

    def clips(self, matrix: Matrix) -> bool:
        """Whether some value may exceed what its scale can hold."""
        return self.scale_amax(matrix) is not None or self.amax(matrix) is not None

    def extras(self, matrix: Matrix) -> dict[str, Tensor]:
        """Return the tensors that a matrix has besides those of its format, by suffix."""
        extras: dict[str, Tensor] = {}
        for part in matrix.parts:
            if part.suffix == PRE_QUANT_SCALE:
                extras[part.suffix] = self._scales[matrix.reads]
            elif (factor := factor_of(part.suffix)) is not None:
                found = [self._choices[key].extras[factor] for key in self._keys(matrix)]
                extras[part.suffix] = found[0] if len(matrix.shape) == 2 else torch.stack(found)
        return extras

    def _keys(self, matrix: Matrix) -> list[tuple[str, int | None]]:
        if len(matrix.shape) == 2:
            return [(matrix.name, None)]
        return [(matrix.name, expert) for expert in range(matrix.shape[0])]

    def folded(self, fold: Fold, value: Tensor) -> Tensor:
        """Return a tensor that takes up a scale."""
        scale = self._scales[fold.group].to(value.device)
        if self._plan.numerics == "exact":
            value, dtype = value.float(), value.dtype
            scale = scale.float()
        else:
            dtype = value.dtype
        if fold.kind == "divide":
            return (value / scale).to(dtype)
        if fold.kind == "multiply_plus_one":
            return ((value + 1.0) * scale - 1.0).to(dtype)
        return (value * scale).to(dtype)

    def input_amax(self, matrix: Matrix) -> list[Tensor]:
        """Return the largest magnitudes of what enters a matrix, where they were chosen."""
        found = (
            self._choices.get(key) for key in self._keys(matrix)
        )  # not of other ranks' experts
        return [c.input_amax for c in found if c is not None and c.input_amax is not None]

    def chosen_inputs(self) -> dict[tuple[str, int | None], Tensor]:
        """Return the largest magnitudes of what enters matrices, as far as they were chosen."""
        found = {key: choice.input_amax for key, choice in self._choices.items()}
        return {key: amax for key, amax in found.items() if amax is not None}

    def take_inputs(self, found: Mapping[tuple[str, int | None], Tensor]) -> None:
        """Take what another process chose for its matrices."""
        for key, amax in found.items():
            self._choices.setdefault(key, Choice(input_amax=amax))

    def _rows(self, name: str) -> Tensor | None:
        """Return the scale [R, 1] that the rows of a matrix take up."""
        after = self._plan.rows.get(name)
        return self._scales[self._reads[after]].view(-1, 1) if after in self._reads else None

    def _with_rows(self, values: Values) -> Values:
        def scaled(matrix: Matrix) -> Tensor:
            value, rows = values(matrix), self._rows(matrix.name)
            return value if rows is None else (value.float() * rows.float()).to(value.dtype)

        return scaled

    def _applied(self, name: str, expert: int | None, value: Tensor) -> Tensor:
        choice: Choice = self._choices[name, expert]
        rows = self._rows(name)
        if rows is not None and self._plan.numerics == "exact":  # rounded once, with what follows
            value = value.float() * rows.float()
        for number, step in enumerate(choice.steps):
            value = step(value)
            if rows is not None and number == 0 and self._plan.numerics == "modelopt":
                value = value * rows
        return value


def _in_order(
    groups: Iterable[str], rows: Mapping[str, str], reads: Mapping[str, str]
) -> list[str]:
    """Return groups, each behind those whose scales the rows of its matrices take up."""
    first: dict[str, set[str]] = {group: set() for group in groups}
    for matrix, after in rows.items():
        if matrix in reads and after in reads:
            first[reads[matrix]].add(reads[after])
    return list(TopologicalSorter(first).static_order())


Peers = Mapping[tuple[str | None, str], Tensor]


def _projection(matrix: Matrix) -> tuple[str | None, str]:
    return matrix.experts, matrix.name.rpartition(".")[2]


def _amax_of_experts(matrices: Iterable[Matrix], statistics: Statistics) -> Peers:
    """Channels' largest magnitudes over all experts of a projection, as the peer joins them."""
    largest: dict[tuple[str | None, str], Tensor] = {}
    for matrix in matrices:
        seen = statistics.at(matrix.seen_at)
        if matrix.expert is None or seen is None or seen.amax is None:
            continue
        before = largest.get(_projection(matrix), seen.amax)
        largest[_projection(matrix)] = torch.maximum(before, seen.amax)
    return largest


def _weights(
    matrix: Matrix, values: Values, statistics: Statistics, peers: Peers
) -> Iterable[Weight]:
    stack = len(matrix.shape) == 3

    def read(expert: int | None) -> Tensor:
        if expert is None:
            return values(matrix)
        part = values(matrix)[expert]
        return part.mT if matrix.input_major else part

    for expert, site in enumerate(sites_of(matrix, matrix.seen_at)):
        seen, number = statistics.at(site), expert if stack else None
        amax = peers.get(_projection(matrix), seen.amax if seen is not None else None)
        yield Weight(
            matrix.name,
            number,
            FORMATS[matrix.format],
            matrix.weight_group,
            site,
            seen,
            amax,
            partial(read, number),
        )


def folds_by_tensor(plan: Plan) -> Mapping[str, Fold]:
    """Return the tensors that take up a scale, by name."""
    return {fold.tensor: fold for fold in plan.folds}
