"""The exact strategies against brute force over small models."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from hypothesis import given, settings
from hypothesis import strategies as st

from modelopt_lite.offload.simulate import NO_BLOCK
from modelopt_lite.offload.stats import LayerStatistics, TensorStatistics
from modelopt_lite.offload.strategies import GlobalTensorSelectionStrategy, KnapsackStrategy
from modelopt_lite.offload.strategies.exact import Program
from modelopt_lite.offload.strategies.problem import Choice, Problem, Request, Score

MIB = 1 << 20
MEMORY = {MIB: 0.05, 4 * MIB: 0.17, 16 * MIB: 0.65, 64 * MIB: 2.6}


def layers(units: list[tuple[float, list[int]]]) -> list[LayerStatistics]:
    """Make layers of (duration, tensor sizes in bytes)."""
    return [
        LayerStatistics(
            label=f"l{i}",
            duration=ms,
            tensors=tuple(
                TensorStatistics(tensor_id=f"{i}.{j}", name=f"l{i}.w{j}", size_bytes=size)
                for j, size in enumerate(sizes)
            ),
        )
        for i, (ms, sizes) in enumerate(units)
    ]


SIZES = st.lists(st.sampled_from([1, 2, 4, 8, 16]).map(lambda m: m * MIB), max_size=2)
UNITS = st.lists(st.tuples(st.sampled_from([0.2, 0.5, 1.0, 2.0]), SIZES), min_size=2, max_size=4)


def sharings(count: int) -> Iterator[list[int]]:
    """All ways to distribute labels over at most four blocks."""

    def grow(prefix: list[int], used: int) -> Iterator[list[int]]:
        if len(prefix) == count:
            yield prefix
            return
        for block in range(min(used + 1, 4)):
            yield from grow([*prefix, block], max(used, block + 1))

    return grow([], 0)


def with_blocks(levels: tuple[int, ...], blocks: list[int]) -> Choice:
    return Choice(levels, tuple(b if k else NO_BLOCK for k, b in zip(levels, blocks, strict=True)))


def every_choice(problem: Problem, *, in_turn: bool = False) -> Iterator[Choice]:
    """All subsets of tensors, with all sharings, or those by position modulo 1 to 4."""
    positions = range(len(problem.labels))
    turns = [
        [problem.active.index(i) % k if i in problem.active else 0 for i in positions]
        for k in range(1, 5)
    ]
    ways = turns if in_turn else list(sharings(len(problem.labels)))
    for levels in itertools.product(*(range(len(lvs)) for lvs in problem.levels)):
        for blocks in ways:
            yield with_blocks(levels, blocks)


def make_problem(units: list[tuple[float, list[int]]], share: float | None) -> Problem:
    """A problem whose budget is that share of the way from the floor to all; None: latency."""
    stats = layers(units)
    free = Request(layers=stats, memory_stats=MEMORY, budget=None).problem()
    if share is None:
        return free
    budget = round(free.floor() + share * (free.total_bytes - free.floor()))
    return Request(layers=stats, memory_stats=MEMORY, budget=budget).problem()


def assert_no_worse(problem: Problem, choice: Choice, optimum: Score) -> None:
    """Stall within a unit, which is the solver's tolerance; then the cost that was asked for."""
    score = problem.score(choice)
    assert score.excess_bytes == 0
    assert score.stall_units <= optimum.stall_units + 1
    if score.stall_units == optimum.stall_units:
        # The second objective is solved to a thousandth of the model.
        assert score.cost[0] <= optimum.cost[0] + problem.total_bytes // 1000


SHARES = st.one_of(st.none(), st.floats(0, 1))


@settings(max_examples=25, deadline=None)
@given(UNITS, SHARES)
def test_knapsack_is_the_optimum_with_blocks_in_turn(
    units: list[tuple[float, list[int]]], share: float | None
) -> None:
    problem = make_problem(units, share)
    optimum = min(problem.score(choice) for choice in every_choice(problem, in_turn=True))
    assert_no_worse(problem, KnapsackStrategy().choose(problem), optimum)


@settings(max_examples=15, deadline=None)
@given(UNITS, SHARES)
def test_tensor_selection_is_the_optimum(
    units: list[tuple[float, list[int]]], share: float | None
) -> None:
    problem = make_problem(units, share)
    optimum = min(problem.score(choice) for choice in every_choice(problem))
    assert_no_worse(problem, GlobalTensorSelectionStrategy().choose(problem), optimum)


@settings(max_examples=25, deadline=None)
@given(UNITS, SHARES, st.lists(st.integers(0, 3), min_size=4, max_size=4))
def test_program_is_exact_for_any_blocks(
    units: list[tuple[float, list[int]]], share: float | None, ids: list[int]
) -> None:
    """The integer program alone, without the search around it, against all subsets."""
    problem = make_problem(units, share)
    blocks = [b if i in problem.active else NO_BLOCK for i, b in enumerate(ids[: len(units)])]
    choices = [
        with_blocks(levels, blocks)
        for levels in itertools.product(*(range(len(lvs)) for lvs in problem.levels))
    ]
    feasible = [s for s in map(problem.score, choices) if not s.excess_bytes]
    answer = Program(problem, blocks).solve() if problem.active else problem.nothing()
    if not feasible:
        assert answer is None
    else:
        assert answer is not None
        assert_no_worse(problem, answer, min(feasible))


@settings(max_examples=25, deadline=None)
@given(UNITS)
def test_floor_is_the_least_peak(units: list[tuple[float, list[int]]]) -> None:
    problem = Request(layers=layers(units), memory_stats=MEMORY, budget=None).problem()
    assert problem.floor() == min(problem.peak(choice) for choice in every_choice(problem))
