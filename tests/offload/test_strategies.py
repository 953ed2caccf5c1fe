"""Strategies against published plans, and against their own promises."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modelopt_lite.errors import StrategyComputeError
from modelopt_lite.offload.simulate import Simulation, simulate
from modelopt_lite.offload.stats import LayerStatistics, TensorStatistics, TransferCurve
from modelopt_lite.offload.strategies import (
    AdaptiveKnapsackStrategy,
    AdaptiveStrategy,
    GlobalOffloadStrategy,
    GlobalTensorSelectionStrategy,
    GreedyStrategy,
    KnapsackBlockStrategy,
    KnapsackStrategy,
    NthLayerStrategy,
    ReleaseAfterUse,
    Strategy,
    StrategyResult,
    StrictRoundRobinAssignment,
)

DATA: dict[str, Any] = json.loads(
    (Path(__file__).parent.parent / "data" / "offload" / "strategies.json").read_text()
)
MEMORY = {int(size): ms for size, ms in DATA["memory_transfers"].items()}
CURVE = TransferCurve(MEMORY)
MIB = 1 << 20
STRICT = GlobalOffloadStrategy(assignment_strategy=StrictRoundRobinAssignment())
STRATEGIES: dict[str, Strategy] = {
    "Knapsack": KnapsackStrategy(),
    "Knapsack(cyclic=False)": KnapsackStrategy(cyclic=False),
    "KnapsackBlock": KnapsackBlockStrategy(),
    "KnapsackBlock(scale=.5)": KnapsackBlockStrategy(scale=0.5),
    "Greedy": GreedyStrategy(),
    "Greedy(scale=2)": GreedyStrategy(scale=2),
    "Nth1": NthLayerStrategy(1),
    "Nth2": NthLayerStrategy(2),
    "Nth3": NthLayerStrategy(3),
    "AdaptiveKnapsack": AdaptiveKnapsackStrategy(),
    "Adaptive": AdaptiveStrategy(),
    "GlobalOffload": GlobalOffloadStrategy(),
    "GlobalOffload(Strict)": STRICT,
    "GTS": GlobalTensorSelectionStrategy(),
    "BudgetFill": AdaptiveStrategy(),  # which includes what that strategy looks for
}


def layers(*units: tuple[float, list[int]]) -> list[LayerStatistics]:
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


@functools.cache
def spec(name: str) -> tuple[LayerStatistics, ...]:
    return tuple(
        LayerStatistics(
            label=label,
            duration=ms,
            tensors=tuple(
                TensorStatistics(tensor_id=i, name=str(i), size_bytes=size, load_time_ms=load)
                for i, size, load in tensors
            ),
        )
        for label, ms, tensors in DATA["specs"][name]
    )


def total(stats: tuple[LayerStatistics, ...] | list[LayerStatistics]) -> int:
    return sum(layer.size_bytes for layer in stats)


@functools.cache
def answer(name: str, strategy: str, budget: int | None) -> StrategyResult | StrategyComputeError:
    try:
        return STRATEGIES[strategy].compute(spec(name), MEMORY, budget)
    except StrategyComputeError as error:
        return error


def ours(name: str, strategy: str, budget: int | None) -> StrategyResult | StrategyComputeError:
    same = {
        "AdaptiveKnapsack": "Knapsack",
        "KnapsackBlock": "Knapsack(cyclic=False)",
        "BudgetFill": "Adaptive",
    }
    if budget is not None:  # where the scale has no effect
        same["KnapsackBlock(scale=.5)"] = "Knapsack(cyclic=False)"
    return answer(name, same.get(strategy, strategy), budget)


def published(name: str, plan: dict[str, Any]) -> Simulation:
    """What our simulator says of a published plan."""
    stats = spec(name)
    size = {t.tensor_id: t.size_bytes for layer in stats for t in layer.tensors}
    moved = {label: sum(size[i] for i in ids) for label, (ids, _) in plan["offload"].items()}
    return simulate(
        [layer.label for layer in stats],
        [layer.duration for layer in stats],
        moved,
        {label: block for label, (_, block) in plan["offload"].items()},
        resident_bytes=total(stats) - sum(moved.values()),
        curve=CURVE,
        block_sizes={int(block): size for block, size in plan["block_sizes"].items()},
    )


@pytest.mark.parametrize(("name", "budget", "strategy", "plan"), DATA["plans"])
def test_at_least_as_good_as_published(
    name: str, budget: int | None, strategy: str, plan: dict[str, Any] | None
) -> None:
    result = ours(name, strategy, budget)
    if isinstance(result, StrategyComputeError):
        assert budget is not None
        assert result.smallest_budget is not None
        assert result.smallest_budget > budget
    else:
        consistent(list(spec(name)), result, budget)
    if plan is None:
        return
    theirs = published(name, plan)
    if budget is not None and theirs.peak_bytes > budget:
        return  # that plan does not keep the budget
    assert isinstance(result, StrategyResult)
    unit = 1e-6 * theirs.compute_ms
    assert result.prediction.total_stall_ms <= theirs.total_stall_ms + unit
    if budget is None and result.prediction.total_stall_ms >= theirs.total_stall_ms - unit:
        assert result.prediction.peak_bytes <= theirs.peak_bytes


def consistent(stats: list[LayerStatistics], result: StrategyResult, budget: int | None) -> None:
    """Check all fields of a result against each other and against the simulator."""
    data, order = result.block_data, [layer.label for layer in stats]
    if data is None:
        assert result.strategy_map == result.offloaded == {}
        assert len(result.notes) == 1
        assert "offloads nothing" in result.notes[0]
        assert result.prediction.peak_bytes == total(stats)
        return
    by_label = {layer.label: set(layer.tensors) for layer in stats}
    for label, tensors in result.offloaded.items():
        assert set(tensors) <= by_label[label]
        assert data.label_to_size_map[label] == sum(t.size_bytes for t in tensors) > 0
    assert list(result.offloaded) == [x for x in order if x in result.offloaded]
    for block, users in data.allocation_ordered.items():
        assert len(users) > 1, "a block for one label saves nothing"
        assert data.block_sizes[block] == max(data.label_to_size_map[u] for u in users)
        assert all(data.label_to_block_id[u] == block for u in users)
        for before, user in zip([users[-1], *users], users, strict=False):
            transfer = order[(order.index(before) + 1) % len(order)]
            assert data.transfer_to_compute_map[transfer] == user
    assert set(result.strategy_map) == set(data.transfer_to_compute_map)
    assert sorted(data.transfer_to_compute_map.values()) == sorted(data.label_to_size_map)
    again = simulate(
        order,
        [layer.duration for layer in stats],
        data.label_to_size_map,
        data.label_to_block_id,
        resident_bytes=total(stats) - result.offloaded_bytes,
        curve=CURVE,
        block_sizes=data.block_sizes,
    )
    assert again == result.prediction
    assert budget is None or again.peak_bytes <= budget
    assert ReleaseAfterUse().compute(result) == result.offloaded


SIZES = st.lists(st.sampled_from([1, 2, 4, 8, 16]).map(lambda m: m * MIB), max_size=2)
UNITS = st.lists(st.tuples(st.sampled_from([0.2, 0.5, 1.0, 2.0]), SIZES), min_size=2, max_size=4)


@pytest.mark.parametrize("name", sorted(set(STRATEGIES) - {"AdaptiveKnapsack", "BudgetFill"}))
@settings(max_examples=6, deadline=None)
@given(units=UNITS)
def test_smallest_budget_is_the_smallest(name: str, units: list[tuple[float, list[int]]]) -> None:
    stats, strategy = layers(*units), STRATEGIES[name]
    if not total(stats):
        return
    with pytest.raises(StrategyComputeError, match="smallest budget") as caught:
        strategy.compute(stats, MEMORY, 0)
    least = caught.value.smallest_budget
    assert caught.value.code == "MOL330"
    assert least is not None
    assert f"{least} bytes" in str(caught.value)
    consistent(stats, strategy.compute(stats, MEMORY, least), least)
    with pytest.raises(StrategyComputeError):
        strategy.compute(stats, MEMORY, least - 1)


@pytest.mark.parametrize("name", ["Knapsack", "GlobalOffload", "GTS", "Greedy", "Adaptive"])
def test_same_answer_every_time(name: str) -> None:
    for budget in (None, 79_697_018):
        stats = list(spec("hetero6"))
        try:
            first = STRATEGIES[name].compute(stats, MEMORY, budget)
        except StrategyComputeError:
            continue
        assert STRATEGIES[name].compute(list(stats), dict(MEMORY), budget) == first


def test_more_memory_never_costs_time() -> None:
    stats = layers(*[(0.3, [8 * MIB, 4 * MIB])] * 6)
    stalls = [
        KnapsackStrategy().compute(stats, MEMORY, budget).prediction.total_stall_ms
        for budget in range(12 * MIB, total(stats) + 1, 10 * MIB)
    ]
    assert stalls == sorted(stalls, reverse=True)
    assert stalls[0] > stalls[-1]


def test_scale_keeps_some_of_the_bus_in_reserve() -> None:
    stats = layers(*[(0.5, [4 * MIB] * 4)] * 5)
    peaks = []
    for scale in (0.25, 0.5, 1.0, 2.0):
        result = KnapsackStrategy(scale=scale).compute(stats, MEMORY)
        copies = sum(e.end_ms - e.start_ms for e in result.prediction.events if e.kind == "copy")
        assert copies <= scale * result.prediction.compute_ms * (1 + 1e-6)
        peaks.append(result.prediction.peak_bytes)
    assert peaks == sorted(peaks, reverse=True)
    assert result.prediction.total_stall_ms > 0  # what a scale above 1 asks for


def test_min_blocks_are_kept_and_given_up_for_a_budget() -> None:
    stats = layers(*[(1.0, [8 * MIB])] * 8)
    two = AdaptiveStrategy().compute(stats, MEMORY).block_data
    four = AdaptiveStrategy(min_blocks=4).compute(stats, MEMORY).block_data
    tight = AdaptiveStrategy(min_blocks=4).compute(stats, MEMORY, 8 * MIB).block_data
    assert two is not None
    assert four is not None
    assert tight is not None
    assert (len(two.block_sizes), len(four.block_sizes), len(tight.block_sizes)) == (2, 4, 1)


def test_alike_labels_in_groups_offload_alike() -> None:
    stats = layers(*[(0.3, [8 * MIB, 4 * MIB, 2 * MIB])] * 6)
    budget = round(0.6 * total(stats))
    result = KnapsackStrategy(group_size=3).compute(stats, MEMORY, budget)
    assert result.block_data
    sizes = [result.block_data.label_to_size_map.get(f"l{i}", 0) for i in range(6)]
    assert len(set(sizes[:3])) == len(set(sizes[3:])) == 1
    consistent(stats, result, budget)


def test_cyclic_decides_on_the_first_label() -> None:
    stats = layers(*[(1.0, [8 * MIB])] * 4)
    with_first = KnapsackStrategy().compute(stats, MEMORY)
    without = KnapsackStrategy(cyclic=False).compute(stats, MEMORY)
    assert "l0" in with_first.offloaded
    assert "l0" not in without.offloaded
    assert with_first.prediction.peak_bytes < without.prediction.peak_bytes


def test_threshold_yields_to_the_budget_only() -> None:
    stats = layers(*[(1.0, [1000, 200])] * 4)
    assert KnapsackStrategy().compute(stats, MEMORY).block_data is None
    result = KnapsackStrategy().compute(stats, MEMORY, 2400)
    assert result.prediction.peak_bytes <= 2400
    small = KnapsackStrategy(threshold_mb=0).compute(stats, MEMORY)
    assert small.prediction.peak_bytes <= 2400


def test_nothing_is_moved_where_all_fits() -> None:
    stats = layers(*[(1.0, [8 * MIB])] * 4)
    result = AdaptiveStrategy().compute(stats, MEMORY, total(stats))
    assert result.block_data is None
    assert "fit the budget" in result.notes[0]
    assert "a block serves two" in AdaptiveStrategy().compute(stats[:1], MEMORY).notes[0]
    slow = layers(*[(0.0, [8 * MIB])] * 4)
    assert "without a stall" in AdaptiveStrategy().compute(slow, MEMORY).notes[0]
    assert AdaptiveStrategy().compute([], MEMORY).prediction.pass_ms == 0.0


def test_load_times_of_tensors_make_the_curve() -> None:
    stats = list(spec("uniform8"))
    assert KnapsackStrategy().compute(stats).prediction.total_stall_ms == 0.0
    with pytest.raises(StrategyComputeError, match="load time") as caught:
        KnapsackStrategy().compute(layers((1.0, [MIB]), (1.0, [MIB])))
    assert caught.value.smallest_budget is None
    gaps = layers((1.0, []), (2.0, []))
    assert KnapsackStrategy().compute(gaps).prediction.pass_ms == 3.0


def test_nth_layer_offloads_its_labels_whole() -> None:
    stats = layers(*[(1.0, [8 * MIB, 4 * MIB])] * 7)
    result = NthLayerStrategy(2).compute(stats, MEMORY)
    assert list(result.offloaded) == ["l2", "l4", "l6"]
    assert all(len(tensors) == 2 for tensors in result.offloaded.values())
    assert result.prediction.total_stall_ms == 0.0


def test_greedy_reaches_for_a_budget() -> None:
    stats = layers(*[(0.3, [24 * MIB])] * 8)
    loose = GreedyStrategy().compute(stats, MEMORY)
    tight = GreedyStrategy().compute(stats, MEMORY, 60 * MIB)
    assert len(tight.offloaded) > len(loose.offloaded)
    assert tight.prediction.peak_bytes <= 60 * MIB


def test_equal_experts_are_counted_not_enumerated() -> None:
    stats = layers(*[(2.0, [3 * MIB] * 128 + [MIB] * 64)] * 4)
    result = GlobalOffloadStrategy().compute(stats, MEMORY, total(stats) // 2)
    consistent(stats, result, total(stats) // 2)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: KnapsackStrategy(n_blocks=0), "n_blocks=0"),
        (lambda: KnapsackStrategy(group_size=0), "group_size is 0"),
        (lambda: NthLayerStrategy(0), "nth_layer is 0"),
        (lambda: AdaptiveKnapsackStrategy(loader_type="x"), "loader_type is 'x'"),  # type: ignore[arg-type]
        (lambda: GlobalTensorSelectionStrategy(optimizer="GA"), "optimizer is 'GA'"),  # type: ignore[arg-type]
        (lambda: GlobalTensorSelectionStrategy(epoch=0), "at least 1"),
        (lambda: GlobalOffloadStrategy(min_blocks=3, max_blocks=2), "min_blocks=3"),
        (lambda: KnapsackStrategy(scale=0).compute([], MEMORY), "scale is 0"),
        (lambda: GreedyStrategy(scale=-1).compute([], MEMORY), "scale is -1"),
        (lambda: KnapsackStrategy(threshold_mb=-1).compute([], MEMORY), "threshold_mb is -1"),
        (lambda: KnapsackStrategy().compute([], MEMORY, -1), "max_gpu_mem_bytes is -1"),
    ],
)
def test_bad_settings(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_labels_and_tensors_are_given_once() -> None:
    one = layers((1.0, [MIB]))
    with pytest.raises(ValueError, match="labels are given twice"):
        KnapsackStrategy().compute([*one, *one], MEMORY)
    shared = LayerStatistics(label="other", duration=1.0, tensors=one[0].tensors)
    with pytest.raises(ValueError, match="is in 'l0' and 'other'"):
        KnapsackStrategy().compute([*one, shared], MEMORY)


def test_strategies_follow_the_protocol() -> None:
    assert all(isinstance(strategy, Strategy) for strategy in STRATEGIES.values())


def test_large_models_are_planned_without_the_program() -> None:
    stats = layers(*[(1.0, [8 * MIB, 4 * MIB])] * 70)
    result = KnapsackStrategy().compute(stats, MEMORY, total(stats) // 2)
    consistent(stats, result, total(stats) // 2)
    assert result.prediction.overhead < 0.01
