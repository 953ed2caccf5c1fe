"""What ranks do in tests of several: they quantize, and something is in their way."""

from __future__ import annotations

import dataclasses
import os
import signal
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from ranks import quantize

from modelopt_lite import job
from modelopt_lite.calibrate import awq
from modelopt_lite.calibrate.algorithm import Weight
from modelopt_lite.calibrate.observe import Site
from modelopt_lite.calibrate.statistics import Statistics
from modelopt_lite.checkpoint import writer
from modelopt_lite.errors import NonFiniteError
from modelopt_lite.offload import Unit
from modelopt_lite.parallel import failure
from modelopt_lite.ranks.crew import Ranks
from modelopt_lite.ranks.joining import Joining
from modelopt_lite.ranks.log import RankLog
from modelopt_lite.request import Request


def breaking(what: str, source: Path, out: Path, batches: list[torch.Tensor], at: str) -> Any:
    """Quantize on two ranks, of which the second breaks when a unit is finished."""
    learn = Ranks.learn

    def breaks(self: Ranks, unit: Unit) -> None:
        if os.environ["RANK"] == "1" and unit.name == at:
            _break(what)
        learn(self, unit)

    Ranks.learn = breaks  # type: ignore[method-assign]
    return quantize(source, out, batches, {"recipe": "fp8"})


def _break(what: str) -> None:
    if what == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    if what == "raises":
        raise NonFiniteError("tensor 'x' holds a NaN")
    if what == "interrupted":
        raise KeyboardInterrupt
    if what == "full":

        def full(fd: int, data: memoryview, offset: int) -> None:
            raise OSError(28, "No space left on device")

        writer._pwrite = full


def dying_first(source: Path, out: Path, batches: list[torch.Tensor]) -> Any:
    learn = Ranks.learn

    def dies(self: Ranks, unit: Unit) -> None:
        if os.environ["RANK"] == "0" and unit.name == "model.layers.1":
            _break("killed")
        learn(self, unit)

    Ranks.learn = dies  # type: ignore[method-assign]
    return quantize(source, out, batches, {"recipe": "fp8"})


def impatient(source: Path, out: Path, batches: list[torch.Tensor]) -> Any:
    os.environ[failure.START_VARIABLE] = "3"
    return quantize(source, out, batches, {"recipe": "fp8"})


def other_seed(source: Path, out: Path, batches: list[torch.Tensor]) -> Any:
    options = {"recipe": "fp8", "seed": int(os.environ["RANK"])}
    return quantize(source, out, batches, options)


def small_second(source: Path, out: Path, batches: list[torch.Tensor]) -> Any:
    """Quantize where the second rank has memory for one expert at a time."""
    make = Request.make_schedule

    def makes(self: Request) -> None:
        make(self)
        if os.environ["RANK"] == "1":
            assert self.job.split_experts(0) == 1
            units = self.job.unit_bytes()[0]
            self.schedule = dataclasses.replace(self.schedule, units=units, experts=1)

    Request.make_schedule = makes  # type: ignore[method-assign]
    return quantize(source, out, batches, {"recipe": "nvfp4"})


def small_units(
    source: Path, out: Path, batches: list[torch.Tensor], recipe: str, stop_at: int
) -> Any:
    """Quantize by units of few tensors; the second rank stops when so many are noted, 0 never."""
    job.UNIT_BYTES = 1 << 12  # type: ignore[attr-defined]
    settle = RankLog.settle
    calls: list[None] = []

    def stops(self: RankLog) -> None:
        settle(self)
        calls.append(None)
        if len(calls) == stop_at and os.environ["RANK"] == "1":
            raise KeyboardInterrupt

    RankLog.settle = stops  # type: ignore[method-assign]
    return quantize(source, out, batches, {"recipe": recipe})


def counting(source: Path, out: Path, batches: list[torch.Tensor]) -> int:
    """Return for how many matrices this process compared scales."""
    losses = awq._losses
    calls: list[object] = []

    def counted(weight: Weight, scales: Sequence[torch.Tensor]) -> torch.Tensor:
        calls.append(weight.key)
        return losses(weight, scales)

    awq._losses = counted
    quantize(source, out, batches, {"recipe": "nvfp4_awq_lite"})
    return len(calls)


def weighing(
    source: Path, out: Path, batches: list[torch.Tensor], recipe: str, ep: int
) -> tuple[int, int]:
    """Return the most bytes of statistics, and of inputs to be told, at the end of a layer."""
    learn, drop = Joining.learn, Statistics.drop
    kept, told = [0], [0]

    def weighs_told(self: Joining, unit: Unit, *, together: bool) -> None:
        told.append(sum(x.nbytes for seen in self._log.values() for _, x, _ in seen))
        learn(self, unit, together=together)

    def weighs_kept(self: Statistics, sites: Iterable[Site]) -> None:
        kept.append(bytes_of(self))
        drop(self, sites)

    Joining.learn = weighs_told  # type: ignore[method-assign]
    Statistics.drop = weighs_kept  # type: ignore[method-assign]
    quantize(source, out, batches, {"recipe": recipe, "ep": ep})
    return max(kept), max(told)


def bytes_of(statistics: Statistics) -> int:
    """Return the memory of all that was seen and is not dropped yet."""
    seen = statistics._seen.values()
    found = [t for s in seen for t in (s.amax, s.mean, s.sum, s.gram, s.blocks, *s.rows)]
    return sum(t.nbytes for t in found if t is not None)
