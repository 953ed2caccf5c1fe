"""Looking for good choices without a solver: block assignments, and small changes that pay.

All of it is deterministic: the same problem gives the same choice.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence

from modelopt_lite.offload.simulate import NO_BLOCK
from modelopt_lite.offload.strategies.assignment import (
    AssignmentStrategy,
    OptimizedRoundRobinAssignment,
    StrictRoundRobinAssignment,
)
from modelopt_lite.offload.strategies.problem import Choice, Problem

_EVALUATIONS = 100_000  # simulated labels in one search: about a second
_STEPS = 24  # parts of a label, or of a window, that fills go through
_PAIRS = 12  # labels up to which two are changed at once


def with_blocks(
    problem: Problem, levels: Sequence[int], assignment: AssignmentStrategy, n_blocks: int
) -> Choice:
    """Assign blocks to the labels whose level is not 0."""
    used = [i for i, k in enumerate(levels) if k]
    blocks = [NO_BLOCK] * len(levels)
    sizes = [problem.levels[i][levels[i]].size for i in used]
    for i, block in zip(used, assignment.assign(sizes, n_blocks), strict=True):
        blocks[i] = block
    return Choice(tuple(levels), tuple(blocks))


def block_counts(problem: Problem, n_blocks: int) -> range:
    """Numbers of blocks to try: all, but in latency mode not fewer than were asked for."""
    fewest = 1 if problem.budget is not None else min(problem.fewest_blocks, n_blocks)
    return range(fewest, n_blocks + 1)


def fills(problem: Problem) -> Iterator[tuple[int, ...]]:
    """Yield level vectors from nothing to all, in three families of a few dozen each.

    The same part of every label; what a part of the previous label's compute time can copy; and
    the whole of every second, third, … label.
    """
    n = len(problem.labels)
    windows = [problem.durations[i - 1] for i in range(n)]
    for step in range(1, _STEPS + 1):
        part = step / _STEPS
        yield tuple(
            _fitting([lv.size for lv in lvs], part * lvs[-1].size) for lvs in problem.levels
        )
    longest = max(
        (problem.copy_ms[i][-1] / windows[i] for i in problem.active if windows[i] > 0), default=0.0
    )
    for part in sorted({1.0, *(longest * step / _STEPS for step in range(1, _STEPS + 1))}):
        yield tuple(
            _fitting(ms, part * window) for ms, window in zip(problem.copy_ms, windows, strict=True)
        )
    for stride in range(1, min(len(problem.active), 8) + 1):
        chosen = set(problem.active[::stride])
        yield tuple(len(lvs) - 1 if i in chosen else 0 for i, lvs in enumerate(problem.levels))


def _fitting(costs: Sequence[float], limit: float) -> int:
    """The last level whose cost is within the limit, to rounding."""
    return bisect.bisect_right(costs, limit * (1 + 1e-9)) - 1


def good_start(problem: Problem, n_blocks: int, *, fixed: bool = False) -> Choice:
    """Take the best fill for each number of blocks, improve each, and return the best.

    ``fixed`` keeps the fills' levels, which are alike where labels are alike.
    """
    starts = [problem.nothing()]
    vectors = list(dict.fromkeys(fills(problem)))
    for count in block_counts(problem, n_blocks):
        in_turn = StrictRoundRobinAssignment()
        starts.append(problem.best(with_blocks(problem, v, in_turn, count) for v in vectors))
    return problem.best(improve(problem, start, n_blocks, fixed=fixed) for start in starts)


def assignments(problem: Problem, levels: Sequence[int], n_blocks: int) -> Iterator[Choice]:
    """Yield block assignments for levels that are fixed: in turn, and by `Optimized…`."""
    for count in block_counts(problem, n_blocks):
        yield with_blocks(problem, levels, StrictRoundRobinAssignment(), count)
        optimized = OptimizedRoundRobinAssignment(count, count)
        yield with_blocks(problem, levels, optimized, count)


def assign(problem: Problem, levels: Sequence[int], n_blocks: int) -> Choice:
    """Return the best assignment found for levels that are fixed."""
    start = problem.best(assignments(problem, levels, n_blocks))
    return improve(problem, start, n_blocks, fixed=True)


def improve(
    problem: Problem,
    start: Choice,
    n_blocks: int,
    *,
    fixed: bool = False,
) -> Choice:
    """Change one label at a time (or two, in small models) while that lowers the score.

    Args:
        problem: The problem.
        start: Where to start; labels alone in a block are made resident.
        n_blocks: Most blocks.
        fixed: Keep the labels and levels of the start, and change blocks only.
    """
    best = problem.without_lone_labels(start)
    score = problem.score(best)
    left = _EVALUATIONS // max(len(best.levels), 1)
    changed = True
    while changed:
        changed = False
        for choice in _neighbours(problem, best, n_blocks, fixed=fixed):
            candidate = problem.without_lone_labels(choice)
            if fixed and candidate.levels != choice.levels:
                candidate = choice
            left -= 1
            if left < 0:
                return best
            new = problem.score(candidate)
            if new < score:
                best, score, changed = candidate, new, True
                break  # neighbours of what was left behind are of no interest
    return best


def _neighbours(
    problem: Problem, choice: Choice, n_blocks: int, *, fixed: bool
) -> Iterator[Choice]:
    ids = sorted(set(choice.blocks) - {NO_BLOCK})
    spare = next(b for b in range(len(ids) + 1) if b not in ids)
    targets = [*ids, spare] if len(ids) < n_blocks else ids
    for i in problem.active:
        here = choice.levels[i]
        if fixed:
            if here:
                yield from (_set(choice, i, here, b) for b in targets if b != choice.blocks[i])
            continue
        top = len(problem.levels[i]) - 1
        for level in sorted({0, here - 1, here, here + 1, top} & set(range(top + 1))):
            for block in targets if level else [NO_BLOCK]:
                if (level, block) != (here, choice.blocks[i]):
                    yield _set(choice, i, level, block)
    if not fixed:
        yield from _resized(problem, choice, ids)
        if len(problem.active) <= _PAIRS:
            yield from _pairs(problem, choice, targets)


def _resized(problem: Problem, choice: Choice, ids: Sequence[int]) -> Iterator[Choice]:
    """Fill one block, made a step larger or smaller; or one larger and another smaller."""
    users = {b: [i for i, block in enumerate(choice.blocks) if block == b] for b in ids}
    options: dict[int, list[int]] = {}
    for b in ids:
        largest = max(problem.levels[i][choice.levels[i]].size for i in users[b])
        sizes = sorted({lv.size for i in users[b] for lv in problem.levels[i][1:]})
        at = bisect.bisect_left(sizes, largest)
        options[b] = sizes[max(at - 1, 0) : at + 2]
    for b in ids:
        for size in options[b]:
            once = _filled(problem, choice, users[b], size)
            yield once
            for other in ids:
                if other != b:
                    for second in options[other]:
                        yield _filled(problem, once, users[other], second)


def _filled(problem: Problem, choice: Choice, users: Sequence[int], size: int) -> Choice:
    """Give each label the most that fits a block of this size, at least its first level."""
    levels = list(choice.levels)
    for i in users:
        levels[i] = max(_fitting([lv.size for lv in problem.levels[i]], size), 1)
    return Choice(tuple(levels), choice.blocks)


def _pairs(problem: Problem, choice: Choice, targets: Sequence[int]) -> Iterator[Choice]:
    """Offload one more step of one label and one less of another; or two labels into one block."""
    for i in problem.active:
        for j in problem.active:
            a, b = choice.levels[i], choice.levels[j]
            if i != j and a and b < len(problem.levels[j]) - 1:
                lowered = _set(choice, i, a - 1, choice.blocks[i] if a > 1 else NO_BLOCK)
                block = choice.blocks[j]
                for target in [block] if block != NO_BLOCK else targets:
                    yield _set(lowered, j, b + 1, target)
            if i < j and not a and not b:
                tops = len(problem.levels[i]) - 1, len(problem.levels[j]) - 1
                for target in targets:
                    yield _set(_set(choice, i, tops[0], target), j, tops[1], target)


def _set(choice: Choice, i: int, level: int, block: int) -> Choice:
    levels, blocks = list(choice.levels), list(choice.blocks)
    levels[i], blocks[i] = level, block
    return Choice(tuple(levels), tuple(blocks))
