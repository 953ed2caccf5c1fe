"""How many bytes a plan may take: what was asked for, and what the device has free."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

from modelopt_lite.errors import StrategyComputeError
from modelopt_lite.offload.device import Device
from modelopt_lite.offload.ledger import Ledger
from modelopt_lite.offload.nesting import Nest, bytes_apart, plan_with_nests
from modelopt_lite.offload.strategies import StrategyResult

log = logging.getLogger("modelopt_lite.offload")

# A strategy on the labels to plan with, given what is to be kept: None, the budget is no concern.
Compute = Callable[[int | None], StrategyResult]


def free_bytes(device: Device, ledger: Ledger) -> int:
    """Return what weights may take: what is free, and what this model's weights have already."""
    free, total = device.memory_info()
    return min(free + ledger.total("device"), total)


def plan_within(
    compute: Compute, budget: int | None, free: int, resident: int, nests: Sequence[Nest]
) -> StrategyResult:
    """Plan within a budget, or within what is free.

    Args:
        compute: The strategy; given the bytes for its blocks and what it keeps.
        budget: Bytes asked for. Where they are more than what is free, that is warned of. None: a
            strategy's own choice, unless that is more than what is free.
        free: Bytes that weights may take.
        resident: Bytes of them that stay whatever the strategy.
        nests: What was seen to be in at once.

    Raises:
        StrategyComputeError: The budget, or what is free, is too little.
    """
    if budget is not None:
        if budget > free:
            log.warning(
                "the budget is %s bytes, and %s are free for weights; it may not be met",
                *(f"{budget:,}", f"{free:,}"),
            )
        return _plan(compute, budget, "the budget", resident, nests)
    plan = plan_with_nests(compute, None, nests)
    needed = resident + plan.prediction.peak_bytes + bytes_apart(nests, plan)
    if needed <= free:
        return plan
    note = (
        f"passes that wait for no copy need {needed:,} bytes and {free:,} are free: a slower plan"
    )
    plan = _plan(compute, free, "what is free", resident, nests)
    return replace(plan, notes=(*plan.notes, note))


def _plan(
    compute: Compute, budget: int, what: str, resident: int, nests: Sequence[Nest]
) -> StrategyResult:
    if budget <= resident:
        raise StrategyComputeError(
            f"{what} is {budget:,} bytes, and {resident:,} stay on the device whatever the "
            "strategy; raise max_gpu_mem_fraction or exclude less",
            smallest_budget=resident + 1,
        )
    try:
        return plan_with_nests(compute, budget - resident, nests)
    except StrategyComputeError as error:
        if error.smallest_budget is None:
            raise
        raise StrategyComputeError(
            f"{error} (beside {resident:,} bytes that stay on the device whatever the strategy, so "
            f"{what} is {budget:,} in all)",
            smallest_budget=error.smallest_budget + resident,
        ) from error
