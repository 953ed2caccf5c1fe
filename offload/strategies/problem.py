"""A planning problem: what may be offloaded, and what a choice of it costs.

A *choice* gives each label a level, which is a subset of its tensors by size, and a block. The
simulator prices it; strategies differ only in the choices they look at.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from modelopt_lite.errors import StrategyComputeError
from modelopt_lite.offload.simulate import (
    NO_BLOCK,
    blocks_needed,
    build_graph,
    cycle_time,
    simulate,
)
from modelopt_lite.offload.stats import (
    LayerStatistics,
    TensorStatistics,
    TransferCurve,
    curve_from_tensors,
)
from modelopt_lite.offload.strategies.base import BlockStrategyData, StrategyResult

MIB = 1 << 20
STALL_UNIT = 1e-6  # of the compute time: shorter stalls count as none; a solver's tolerance
_MAX_LEVELS = 32  # subset sizes kept for each label
_ALL_LEVELS = 3200  # and for all labels together, but never fewer than 4 each


class Level(NamedTuple):
    """A subset of a label's tensors."""

    size: int
    tensors: tuple[TensorStatistics, ...]


class Choice(NamedTuple):
    """Level index and block id of every label; ``NO_BLOCK`` exactly where the level is 0."""

    levels: tuple[int, ...]
    blocks: tuple[int, ...]


class Score(NamedTuple):
    """Less is better, in the order of the fields.

    ``missing_blocks`` counts the blocks below the fewest that were asked for.
    ``cost`` is (peak, transferred) in latency mode, where memory is what offloading is for, and
    (transferred, peak) in memory mode, where a peak below the budget is of no use but a quieter
    bus forgives timings that vary.
    """

    excess_bytes: int
    stall_units: int
    missing_blocks: int
    cost: tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The arguments of ``Strategy.compute``, and the settings that all strategies share."""

    layers: Sequence[LayerStatistics]
    memory_stats: Mapping[int, float] | None
    budget: int | None
    scale: float = 1.0
    threshold_mb: float = 0.1
    min_blocks: int = 1
    first: bool = True  # whether the first label may be offloaded

    def problem(self) -> Problem:
        """Build the problem. Below the threshold tensors are offloaded only to meet the budget."""
        problem = Problem(self, threshold=round(self.threshold_mb * MIB))
        if self.budget is not None and problem.floor() > self.budget:
            return Problem(self, threshold=1)
        return problem


class Problem:
    """The choices, and their price."""

    def __init__(self, request: Request, *, threshold: int) -> None:
        layers = request.layers
        _check(layers, request)
        self.labels = [layer.label for layer in layers]
        self.durations = [layer.duration for layer in layers]
        self.compute_ms = sum(self.durations)
        self.total_bytes = sum(layer.size_bytes for layer in layers)
        self.budget = request.budget
        per_label = max(4, min(_MAX_LEVELS, _ALL_LEVELS // max(len(layers), 1)))
        self.levels = [
            _levels([t for t in layer.tensors if t.size_bytes >= threshold], per_label)
            if i or request.first
            else (Level(0, ()),)
            for i, layer in enumerate(layers)
        ]
        self.active = [i for i, levels in enumerate(self.levels) if len(levels) > 1]
        # A block is shared by two labels at least: small models have no use for many.
        self.fewest_blocks = max(min(request.min_blocks, len(self.active) // 2), 1)
        self.curve = _curve(request, needed=bool(self.active))
        # In latency mode a scale below 1 plans as if the bus were slower: that is the spare time.
        scale = request.scale if self.budget is None else 1.0
        self.copy_ms = [
            [self.curve.ms(lv.size) / scale if lv.size else 0.0 for lv in levels]
            for levels in self.levels
        ]
        self._known: dict[Choice, Score] = {}

    def floor(self, active: Iterable[int] | None = None) -> int:
        """Return the least possible peak: all of the active labels through a single block.

        A smaller block saves less: while two labels are cut short by it, each byte that it loses
        makes two bytes resident.
        """
        sizes = [self.levels[i][-1].size for i in (self.active if active is None else active)]
        return self.total_bytes - sum(sizes) + max(sizes, default=0)

    def nothing(self) -> Choice:
        """The choice to keep all resident."""
        n = len(self.labels)
        return Choice((0,) * n, (NO_BLOCK,) * n)

    def sizes(self, choice: Choice) -> list[int]:
        """Bytes that each label transfers."""
        return [levels[k].size for levels, k in zip(self.levels, choice.levels, strict=True)]

    def peak(self, choice: Choice) -> int:
        """Resident bytes plus blocks."""
        sizes = self.sizes(choice)
        return self.total_bytes - sum(sizes) + sum(blocks_needed(sizes, choice.blocks).values())

    def stall_ms(self, choice: Choice) -> float:
        """Time by which the simulator's pass exceeds the compute time."""
        copy_ms = [ms[k] for ms, k in zip(self.copy_ms, choice.levels, strict=True)]
        return cycle_time(build_graph(self.durations, copy_ms, choice.blocks)) - self.compute_ms

    def score(self, choice: Choice) -> Score:
        """Price a choice with the simulator."""
        if choice not in self._known:
            sizes, peak = self.sizes(choice), self.peak(choice)
            unit = STALL_UNIT * self.compute_ms or STALL_UNIT
            self._known[choice] = Score(
                excess_bytes=max(peak - self.budget, 0) if self.budget is not None else 0,
                stall_units=round(self.stall_ms(choice) / unit),
                missing_blocks=self._missing(choice),
                cost=(peak, sum(sizes)) if self.budget is None else (sum(sizes), peak),
            )
        return self._known[choice]

    def _missing(self, choice: Choice) -> int:
        used = len(set(choice.blocks) - {NO_BLOCK})
        # In memory mode it is well to need none; in latency mode memory is to be saved.
        idle = self.budget is not None and not used
        return 0 if idle else max(self.fewest_blocks - used, 0)

    def best(self, choices: Iterable[Choice]) -> Choice:
        """Return the first of the choices with the least score, after `without_lone_labels`."""
        return min((self.without_lone_labels(c) for c in choices), key=self.score)

    def without_lone_labels(self, choice: Choice) -> Choice:
        """Keep resident each label that has a block to itself: the same bytes, and no copies."""
        users = [b for b in choice.blocks if b != NO_BLOCK]
        lone = {b for b in users if users.count(b) == 1}
        return Choice(
            tuple(0 if b in lone else k for k, b in zip(choice.levels, choice.blocks, strict=True)),
            tuple(NO_BLOCK if b in lone else b for b in choice.blocks),
        )

    def require(self, floor: int, who: str) -> None:
        """Raise unless the budget, where there is one, is at least ``floor`` bytes."""
        if self.budget is not None and self.budget < floor:
            raise StrategyComputeError(
                f"{who} cannot keep within {self.budget} bytes: the smallest budget it can meet is "
                f"{floor} bytes ({floor / MIB:.1f} MiB) of {self.total_bytes}; "
                "raise max_gpu_mem_fraction, or offload more units",
                smallest_budget=floor,
            )

    def result(self, choice: Choice, who: str) -> StrategyResult:
        """Turn the final choice into a plan.

        Raises:
            StrategyComputeError: The choice exceeds the budget.
        """
        choice = self.without_lone_labels(choice)
        self.require(self.peak(choice), who)
        sizes = self.sizes(choice)
        by_label = {label: size for label, size in zip(self.labels, sizes, strict=True) if size}
        ids = _numbered(choice.blocks)
        blocks = {
            label: ids[b]
            for label, b in zip(self.labels, choice.blocks, strict=True)
            if b != NO_BLOCK
        }
        prediction = simulate(
            self.labels,
            self.durations,
            by_label,
            blocks,
            resident_bytes=self.total_bytes - sum(sizes),
            curve=self.curve,
        )
        data = self._block_data(by_label, blocks)
        chosen = {
            label: self.levels[i][choice.levels[i]].tensors
            for i, label in enumerate(self.labels)
            if sizes[i]
        }
        return StrategyResult(
            strategy_map={t: chosen[c] for t, c in data.transfer_to_compute_map.items()},
            block_data=data if by_label else None,
            prediction=prediction,
            notes=() if by_label else (self._why_nothing(who),),
        )

    def _block_data(self, sizes: dict[str, int], blocks: dict[str, int]) -> BlockStrategyData:
        ordered: dict[int, list[str]] = {}
        for label, block in blocks.items():
            ordered.setdefault(block, []).append(label)
        position = {label: i for i, label in enumerate(self.labels)}
        transfers = {}
        for users in ordered.values():
            for before, label in zip([users[-1], *users], users, strict=False):
                transfers[self.labels[(position[before] + 1) % len(self.labels)]] = label
        return BlockStrategyData(
            label_to_size_map=sizes,
            allocation_ordered=dict(sorted(ordered.items())),
            block_sizes={b: max(sizes[u] for u in users) for b, users in sorted(ordered.items())},
            label_to_block_id=blocks,
            transfer_to_compute_map=dict(
                sorted(transfers.items(), key=lambda item: position[item[0]])
            ),
        )

    def _why_nothing(self, who: str) -> str:
        if self.budget is not None and self.budget >= self.total_bytes:
            why = f"all {self.total_bytes} bytes fit the budget of {self.budget}"
        elif len(self.active) < 2:
            why = f"{len(self.active)} label(s) may be offloaded, and a block serves two or more"
        else:
            why = "no two labels can share a block without a stall; give a budget to accept stalls"
        return f"{who} offloads nothing: {why}"


def _check(layers: Sequence[LayerStatistics], request: Request) -> None:
    labels = [layer.label for layer in layers]
    if len(set(labels)) != len(labels):
        raise ValueError(
            f"labels are given twice: {sorted({x for x in labels if labels.count(x) > 1})}"
        )
    seen: dict[object, str] = {}
    for layer in layers:
        for tensor in layer.tensors:
            if tensor.tensor_id in seen:
                raise ValueError(
                    f"tensor {tensor.name!r} is in {seen[tensor.tensor_id]!r} and {layer.label!r}; "
                    "a tensor of several labels must be resident, or given to one of them"
                )
            seen[tensor.tensor_id] = layer.label
    if request.budget is not None and request.budget < 0:
        raise ValueError(f"max_gpu_mem_bytes is {request.budget}; it must not be negative")
    if not request.scale > 0:
        raise ValueError(f"scale is {request.scale}; it must be above 0")
    if request.threshold_mb < 0:
        raise ValueError(f"threshold_mb is {request.threshold_mb}; it must not be negative")


def _curve(request: Request, *, needed: bool) -> TransferCurve:
    if request.memory_stats:
        return TransferCurve(request.memory_stats)
    try:
        return curve_from_tensors(request.layers)
    except ValueError as error:
        if needed:
            raise StrategyComputeError(str(error)) from error
        return TransferCurve({1: 1.0})  # nothing will be copied


def _levels(tensors: Sequence[TensorStatistics], limit: int) -> tuple[Level, ...]:
    """Return the sizes that subsets have, from none to all, at most ``limit`` evenly spread ones.

    Tensors of one size are alike: the first of them are taken. Up to ``limit`` sizes, every one
    that a subset can have is there.
    """
    groups: dict[int, list[TensorStatistics]] = {}
    for tensor in tensors:
        if tensor.size_bytes:
            groups.setdefault(tensor.size_bytes, []).append(tensor)
    sums: dict[int, tuple[int, ...]] = {0: ()}  # size -> how many of each group
    ordered = sorted(groups.items(), reverse=True)
    for size, members in ordered:
        grown: dict[int, tuple[int, ...]] = {}
        for total, counts in sums.items():
            for k in range(len(members) + 1):
                grown.setdefault(total + k * size, (*counts, k))
        sums = {s: grown[s] for s in _spread(sorted(grown), 8 * limit)}
    return tuple(
        Level(
            total,
            tuple(
                t for (_, members), k in zip(ordered, sums[total], strict=True) for t in members[:k]
            ),
        )
        for total in _spread(sorted(sums), limit)
    )


def _spread(values: list[int], limit: int) -> list[int]:
    """Keep the ends and, where there are more than ``limit``, those next above an even spacing."""
    if len(values) <= limit:
        return values
    low, high = values[0], values[-1]
    kept: list[int] = []
    for value in values:
        if not kept or value == high or (value - low) * (limit - 1) >= (high - low) * len(kept):
            kept.append(value)
    return kept


def _numbered(blocks: Sequence[int]) -> dict[int, int]:
    """Number blocks from 0 by first use."""
    ids: dict[int, int] = {}
    for block in blocks:
        if block != NO_BLOCK:
            ids.setdefault(block, len(ids))
    return ids
