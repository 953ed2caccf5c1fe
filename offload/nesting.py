"""Units that run inside of other units: what is in at once must fit, whatever block it was given.

A block serves one label at a time. A label that enters while another one computes with its block
takes a block that nobody computes with, and where none is large enough, memory of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from modelopt_lite.errors import StrategyComputeError
from modelopt_lite.offload.strategies import StrategyResult

Nest = tuple[str, ...]  # labels that were in at once, the outermost first


def idle_block(nbytes: int, sizes: Mapping[int, int], busy: Collection[int]) -> int | None:
    """Return the smallest block of those that nobody computes with into which bytes fit."""
    fitting = [(size, block) for block, size in sizes.items() if size >= nbytes]
    return min(((s, b) for s, b in fitting if b not in busy), default=(0, None))[1]


def bytes_apart(nests: Iterable[Nest], plan: StrategyResult) -> int:
    """Return the most bytes that labels of a nest take beside the blocks of a plan."""
    data = plan.block_data
    if data is None:
        return 0
    most = 0
    for nest in nests:
        busy: set[int] = set()
        apart = 0
        for label in nest:
            own = data.label_to_block_id.get(label)
            if own is None:
                continue
            if own in busy:
                nbytes = data.label_to_size_map[label]
                own = idle_block(nbytes, data.block_sizes, busy)
                apart += nbytes if own is None else 0
            if own is not None:
                busy.add(own)
        most = max(most, apart)
    return most


def plan_with_nests(
    compute: Callable[[int | None], StrategyResult], budget: int | None, nests: Sequence[Nest]
) -> StrategyResult:
    """Plan within a budget that also covers labels inside of others.

    Args:
        compute: A strategy, given the bytes for its blocks and what it keeps.
        budget: Bytes in all. None: as many as the strategy likes.
        nests: What was seen to be in at once.

    Raises:
        StrategyComputeError: The budget is too small; ``smallest_budget`` is one that can be met.
    """
    try:
        return _plan(compute, budget, nests)
    except StrategyComputeError as error:
        smallest = error.smallest_budget
        while nests and smallest is not None:
            try:
                _plan(compute, smallest, nests)
            except StrategyComputeError as too_small:
                smallest = max(too_small.smallest_budget or 0, smallest + 1)
            else:
                break
        if smallest == error.smallest_budget:
            raise
        raise StrategyComputeError(
            f"{error}; as units run inside of others, {smallest:,} bytes are needed",
            smallest_budget=smallest,
        ) from error


def _plan(
    compute: Callable[[int | None], StrategyResult], budget: int | None, nests: Sequence[Nest]
) -> StrategyResult:
    reserved = 0
    while True:
        try:
            plan = compute(None if budget is None else max(budget - reserved, 0))
        except StrategyComputeError as error:
            if not reserved or error.smallest_budget is None:
                raise
            raise StrategyComputeError(
                f"{error} (beside {reserved:,} bytes for units that run inside of others)",
                smallest_budget=error.smallest_budget + reserved,
            ) from error
        apart = bytes_apart(nests, plan)
        if budget is None or plan.prediction.peak_bytes + apart <= budget:
            return plan
        reserved = apart  # more than before, or the plan would have fitted
