"""Which matrix of an expert is which, told from a block's own forward pass.

An expert computes ``down(act(gate(x)) * up(x))``, or ``down(act(up(x)))`` without a gate, where
``act(0) = 0``. Two laws follow that only the right names, halves and orientation obey:

- Where a row of the gate (of up, without a gate) is zero, the column of down that reads it does not
  matter; where the row is not zero, it does.
- The block's output is affine in a factor on up. It is not in a factor on the gate: the activation
  bends.

Shapes: I expert width, H hidden width; gate and up are [I, H], down is [H, I].
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Literal

import torch
from torch import Tensor, nn

from modelopt_lite.checkpoint.names import NameMap, Region
from modelopt_lite.doctor.anatomy import Block, child_of
from modelopt_lite.doctor.instance import Instance, rerun
from modelopt_lite.models.specs import ExpertStorageSpec
from modelopt_lite.select import slice_expert

# Parts of the change that the factor makes at all. Products in float32 round to about 1e-6 of it;
# an activation on values around 1 bends by about 1.
_ROUNDING = 1e-4
_BENT = 1e-2

# For each expert the views of its matrices: (gate, up, down), or (up, down).
Matrices = list[tuple[Tensor, ...]]
Verdict = Literal["holds", "unpaired", "swapped", "capped"]


def judge(made: Instance, block: Block, matrices: Matrices) -> Verdict:
    """Say whether the matrices of all experts are what they are taken for.

    Returns:
        "holds", "unpaired" (down does not read what gate and up give), "swapped" (gate is up), or
        "capped" (neither is affine: the product passes another function, and nothing is told).
    """
    verdict = _judge(made, block, block.module, matrices)
    experts = child_of(block.module, block.container)
    if verdict == "capped" and block.container and experts in made.calls:
        return _judge(made, block, experts, matrices)  # what follows them in the block may bend
    return verdict


def _judge(made: Instance, block: Block, probed: nn.Module, matrices: Matrices) -> Verdict:
    first, down = [m[0] for m in matrices], [m[-1] for m in matrices]
    if any(a.shape[0] != d.shape[1] for a, d in zip(first, down, strict=True)):
        return "unpaired"
    with _no_biases(block):
        base = rerun(made, probed)
        if not _paired(made, probed, first, down, base):
            return "unpaired"
        if len(matrices[0]) == 2:
            return "holds"
        gate, up = (_bend(made, probed, [m[i] for m in matrices], base) for i in (0, 1))
    if up < _ROUNDING:
        return "holds" if gate > _BENT else "capped"
    return "swapped" if gate < _ROUNDING else "capped"


def single(block: Block, order: tuple[str, ...]) -> Matrices:
    """Return the matrices of experts that are a module each, those of ``order``; [] without."""
    found: Matrices = []
    for expert in block.experts:
        linears = [child_of(expert, name) for name in order]
        if not all(isinstance(linear, nn.Linear) for linear in linears):
            return []
        found.append(tuple(linear.weight for linear in linears))
    return found


def single_on_disk(
    made: Instance, block: Block, names: NameMap, storage: ExpertStorageSpec
) -> Matrices:
    """Return where the single experts of the disk lie in stacked parameters; [] where nowhere."""
    state = made.model.state_dict(keep_vars=True)
    own = {id(parameter) for parameter in block.stacks.values()}
    found: dict[int, dict[str, Tensor]] = {}
    for source, (entry, region) in names.places.items():
        name = source.removesuffix(".weight")
        expert, _ = storage.expert_of(name)
        if expert is not None and region and id(state[entry]) in own:
            found.setdefault(expert, {})[name.rpartition(".")[2]] = state[entry][region]
    wanted = storage.linear_names
    if any(set(wanted) - set(roles) for roles in found.values()):
        return []
    return [tuple(found[expert][role] for role in wanted) for expert in sorted(found)]


def stacks_by_name(made: Instance, block: Block) -> dict[str, Tensor]:
    """Return the stacks of a block by their names in memory and on disk, laid out as there.

    Where transformers turns a stack round as it loads, the one on disk is a turned view; where it
    joins stacks, a part of the joined one. What else it does, `rows_on_disk` tells.
    """
    found = dict(block.stacks)
    for source, stack, region in _stacks_on_disk(made, block):
        shape, view = made.saved[0][source].shape, stack[region] if region else stack
        if len(shape) == 3 and shape in (tuple(view.shape), tuple(view.mT.shape)):
            leaf = source.removesuffix(".weight").rpartition(".")[2]
            found[leaf] = view if shape == tuple(view.shape) else view.mT
    return found


def _stacks_on_disk(made: Instance, block: Block) -> Iterator[tuple[str, Tensor, Region]]:
    """Yield what fills the stacks of a block: name on disk, the stack, and the region filled."""
    state = made.model.state_dict(keep_vars=True)
    own = {id(parameter) for parameter in block.stacks.values()}
    names = made.names
    for source, (entry, region) in names.places.items() if isinstance(names, NameMap) else ():
        if id(state[entry]) in own:
            yield source, state[entry].data, region


def rows_on_disk(made: Instance, block: Block) -> dict[str, Tensor]:
    """Return, of stacks whose rows transformers reorders, which row of the disk each row is.

    Told by its own conversion, of numbers: gate and up may alternate on disk and not in memory.
    """
    found: dict[str, Tensor] = {}
    for source, stack, region in _stacks_on_disk(made, block):
        assert isinstance(made.names, NameMap)
        group = made.names.by_source[source]
        if group.convert is None or region or len(group.sources) > 1 or stack.ndim != 3:
            continue
        shape = made.saved[0][source].shape
        if shape != tuple(stack.shape):
            continue  # turned round
        numbers = torch.arange(float(shape[1]))[None, :, None].expand(shape).clone()
        [made_of] = group.convert({source: numbers}).values()
        if (rows := made_of[0, :, 0].long()).tolist() != list(range(shape[1])):
            found[source.removesuffix(".weight").rpartition(".")[2]] = rows
    return found


def stacked(made: Instance, block: Block, storage: ExpertStorageSpec) -> Matrices:
    """Cut stacked parameters into matrices, as the export does; [] where one is not there."""
    by_name = stacks_by_name(made, block)
    storage = as_they_lie(storage, by_name)
    stacks = [by_name.get(name) for name in storage.stacked_names]
    if not stacks or not all(isinstance(s, Tensor) and s.ndim == 3 for s in stacks):
        return []
    found: Matrices = []
    reordered = rows_on_disk(made, block)
    for expert in range(block.count):
        cut: list[Tensor] = []
        for name, stack in zip(storage.stacked_names[:-1], stacks[:-1], strict=True):
            assert stack is not None
            for position in range(parts := _parts(stack, stacks, storage)):
                region, _ = slice_expert(tuple(stack.shape), expert, position, parts, storage)
                cut.append(_rows(stack, region, reordered.get(name)))
        assert stacks[-1] is not None
        cut.append(stacks[-1][expert])
        found.append(tuple(m.T if storage.input_major else m for m in cut))
    return found


def as_they_lie(storage: ExpertStorageSpec, by_name: Mapping[str, Tensor]) -> ExpertStorageSpec:
    """Return the section with the orientation of the stacks, where either may be.

    Where the section gives one alone, it must be the right one, whatever shapes say.
    """
    names = [by_name.get(name) for name in storage.stacked_names]
    if not storage.either_major or not names or names[0] is None or names[-1] is None:
        return storage
    return storage.oriented(tuple(names[0].shape), tuple(names[-1].shape))


def _rows(stack: Tensor, region: Region, rows: Tensor | None) -> Tensor:
    """Return the view of a stack in memory that holds a region of the one on disk.

    Args:
        stack: [E, R, K], as in memory.
        region: Of the one on disk: one expert, then rows or columns.
        rows: The row of the disk that each row in memory is; None: its own.
    """
    if rows is None:
        return stack[region]
    wanted = torch.arange(len(rows))[region[1]]
    half = len(wanted)
    for part in (slice(0, half), slice(half, None), slice(0, None, 2), slice(1, None, 2)):
        if torch.equal(rows[part], wanted):
            return stack[region[0], part]
    return stack[region[0], ::2]  # gate and up mixed, as there: the forward pass contradicts it


def _parts(stack: Tensor, stacks: Sequence[Tensor | None], storage: ExpertStorageSpec) -> int:
    """Return 2 where a stack holds gate and up, by the width that down reads."""
    down = stacks[-1]
    assert down is not None
    out, read = (2, 1) if storage.input_major else (1, 2)
    return 2 if len(stacks) == 2 and stack.shape[out] == 2 * down.shape[read] else 1


def _paired(
    made: Instance, probed: nn.Module, first: list[Tensor], down: list[Tensor], base: Tensor
) -> bool:
    """Whether row r of the first matrix is what column r of down reads.

    It is seen at the first r behind the middle whose column matters at all: an activation may have
    cut off what a row gives for every token.
    """

    def shift(view: Tensor) -> None:
        view.add_(1.0)

    width = down[0].shape[1]
    for r in range(width // 2 + 1, width):
        columns, rows = [matrix[:, r] for matrix in down], [matrix[r] for matrix in first]
        with _changed(columns, shift):
            moved = (rerun(made, probed) - base).abs().max()
        if moved <= 1e-5:
            continue
        with _changed(rows, Tensor.zero_):
            still = rerun(made, probed)
            with _changed(columns, shift):
                left = (rerun(made, probed) - still).abs().max()
        return bool(left < _ROUNDING * moved)
    return False


def _bend(made: Instance, probed: nn.Module, views: list[Tensor], base: Tensor) -> float:
    """How far the output is from affine in a factor on some matrices, seen at -1, 0 and 1."""
    with _changed(views, Tensor.zero_):
        zero = rerun(made, probed)
    with _changed(views, Tensor.neg_):
        minus = rerun(made, probed)
    change = (base - zero).abs().max().clamp(min=1e-12)
    return float(((minus - zero) + (base - zero)).abs().max() / change)


@contextmanager
def _changed(views: Sequence[Tensor], change: Callable[[Tensor], object]) -> Iterator[None]:
    """Change some views of parameters for a while."""
    before = [view.clone() for view in views]
    try:
        for view in views:
            change(view)
        yield
    finally:
        for view, old in zip(views, before, strict=True):
            view.copy_(old)


@contextmanager
def _no_biases(block: Block) -> Iterator[None]:
    """Let the experts have no biases for a while."""
    container = child_of(block.module, block.container)
    inside: list[nn.Module] = [*block.experts]
    if block.container and isinstance(container, nn.Module):
        inside.append(container)
    biases = {id(p): p for m in inside for n, p in m.named_parameters() if n.endswith("bias")}
    with _changed(list(biases.values()), torch.Tensor.zero_):
        yield
