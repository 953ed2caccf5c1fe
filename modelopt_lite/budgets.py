"""Budgets: how much of each tier of memory a run may take, and whether it can keep to that."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from modelopt_lite.calibrate.data import CalibrationData
from modelopt_lite.checkpoint.writer import parse_size
from modelopt_lite.errors import RecipeError
from modelopt_lite.job import Job
from modelopt_lite.offload.config_sources import ENV_PREFIX
from modelopt_lite.offload.device import current_device
from modelopt_lite.offload.hostmemory import host_memory
from modelopt_lite.predict import Prediction
from modelopt_lite.process import usable_cores
from modelopt_lite.progress import Outlook

Size = str | int | float
SIZES = ("host_memory", "device_memory", "disk_scratch")
Foretell = Callable[..., Prediction]
_FRACTION = re.compile(r"\s*(\d+(?:\.\d+)?)\s*%\s*|\s*(0?\.\d+)\s*", re.ASCII)
_MARGIN = 0.9  # of a budget is filled with what is read ahead; a prediction may be off


@dataclass(frozen=True, slots=True, kw_only=True)
class Budgets:
    """Bytes that a run may take; None where nothing was said.

    Attributes:
        host: Resident memory of the process.
        device: Weights, activations and results where the model runs; on a CPU part of ``host``.
        disk: Temporary files.
        weights: Weights where the model runs, by an offload configuration.
    """

    host: int | None = None
    device: int | None = None
    disk: int | None = None
    weights: int | None = None

    def met_by(self, prediction: Prediction) -> bool:
        """Whether a run as foretold keeps to them."""
        pairs = (
            (self.host, prediction.host_peak),
            (self.device, prediction.work_peak),
            (self.disk, prediction.disk_scratch),
            (self.weights, int(prediction.work["weights"])),
        )
        return all(have is None or need <= have for have, need in pairs)

    def check(self, least: Prediction, largest: str = "") -> None:
        """Refuse budgets below what a run takes that reads nothing ahead.

        Args:
            least: What it takes.
            largest: The unit of weights that it is for, and its size, in words.

        Raises:
            RecipeError: It names the smallest budget that can be met.
        """
        for name, have, need, parts in (
            ("host_memory", self.host, least.host_peak, {**least.process, **least.work}),
            ("device_memory", self.device, least.work_peak, least.work),
            ("disk_scratch", self.disk, least.disk_scratch, {}),
            ("offload: the budget of weights", self.weights, int(least.work["weights"]), {}),
        ):
            if have is not None and have < need:
                most = sorted(parts.items(), key=lambda part: -part[1])[:3]
                what = ", ".join(f"{name} {size:,}" for name, size in most)
                if largest and "weights" in dict(most):
                    what += f"; {largest}"
                raise RecipeError(
                    f"{name} is {have:,} bytes, and the smallest that can be met is {need:,}"
                    f"{f' ({what})' if what else ''}; give that, or less to calibrate with "
                    "(calib_size, calib_seq_len, batch_size)"
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """What is in memory when.

    Attributes:
        units: Bytes of units at a time; None: all of them, for the whole run.
        waiting: Bytes of waiting activations; those beyond lie on disk. None: no limit.
        scratch: The most bytes that may lie there; None: no limit.
        experts: How many experts of a layer come in at a time; None: all.
        overlapped: A unit is quantized and written while the next one computes.
    """

    units: int | None = None
    waiting: int | None = None
    scratch: int | None = None
    experts: int | None = None
    overlapped: bool = True


def make_schedule(job: Job, budgets: Budgets, foretell: Foretell, *, stream: bool) -> Schedule:
    """Decide what is in memory when, so that a run keeps to its budgets.

    Without budgets three layers are in memory: one is read, one computes, one is quantized and
    written. Searches of scales take most of a run's time, and would keep what entered two layers:
    there a layer is quantized before the next one computes, and two are in memory. So it is with
    several processes, which must ask one another in one order, and where the process may run on one
    core only: a second thread costs time there. What budgets leave beyond the least
    that the run takes is for reading further ahead. Where one layer is too much, waiting
    activations go to disk, and then experts come in a few at a time.

    Args:
        job: The run; its plan is changed where experts come in a few at a time.
        budgets: What it may take.
        foretell: `predict` for the run, but for its arguments ``budget`` and ``waiting``.
        stream: Bring units in as they are needed.

    Raises:
        RecipeError: The budgets cannot be met.
    """
    schedule, least = _least(job, budgets, foretell, stream)
    budgets.check(least, _largest(job) if stream else "")
    return _filled(job, budgets, schedule, least)


def _largest(job: Job) -> str:
    """Say which unit of weights is the largest: it comes in whole."""
    if job.plan.by_tensor:
        sizes = zip(job.unit_sizes(), job.plan.units, strict=True)
    else:
        sizes = zip(map(job.store().bytes_of, job.own_units), job.own_units, strict=True)
    size, name = max((size, unit.name) for size, unit in sizes)
    return f"the largest that comes in whole is {name or 'outside of all layers'} of {size:,}"


def _least(
    job: Job, budgets: Budgets, foretell: Foretell, stream: bool
) -> tuple[Schedule, Prediction]:
    """The schedule that departs least from one unit at a time, and what a run takes by it."""
    schedule = Schedule(
        units=job.unit_bytes()[0] if stream else None,
        scratch=budgets.disk,
        overlapped=(
            usable_cores() > 1
            and not job.plan.recipe.algorithm.needs_inputs
            and job.degrees is None
        ),
    )
    least = foretell(budget=schedule.units, waiting=None)
    if not stream or budgets.met_by(least):
        return schedule, least
    if budgets.disk != 0 and not replace(budgets, weights=None).met_by(least):
        schedule = replace(schedule, waiting=0)
        least = foretell(budget=schedule.units, waiting=0)
    room = min(
        have - need
        for have, need in (
            (budgets.host, least.host_peak),
            (budgets.device, least.work_peak),
            (budgets.weights, int(least.work["weights"])),
        )
        if have is not None
    )
    if room < 0 and job.plan.needs_calibration:
        experts = job.split_experts(int(least.work["weights"]) + room)
        schedule = replace(schedule, units=job.unit_bytes()[0], experts=experts)
        least = foretell(budget=schedule.units, waiting=schedule.waiting)
    return schedule, least


def _filled(job: Job, budgets: Budgets, schedule: Schedule, least: Prediction) -> Schedule:
    if schedule.units is None:
        return schedule
    spare = [
        int(_MARGIN * have) - need
        for have, need in ((budgets.host, least.host_peak), (budgets.device, least.work_peak))
        if have is not None
    ]
    units = job.unit_bytes(3 if schedule.overlapped else 2)[1]
    if spare:
        units = int(least.work["weights"]) + max(min(spare), 0)
    return replace(schedule, units=min(units, budgets.weights or units))


def make_outlook(
    job: Job, predicted: Prediction, budgets: Budgets, data: CalibrationData | None
) -> Outlook:
    """Return what a display of the run's progress shows beside what has been done."""
    on_host, device = predicted.on_host, job.device
    return Outlook(
        tokens=data.tokens if data else 0,
        bytes_to_read=predicted.bytes_read,
        host_budget=budgets.host or predicted.host_peak,
        device_budget=budgets.device or predicted.device_peak,
        device_used=None if on_host else lambda: torch.accelerator.memory_allocated(device),
    )


def read_budgets(
    given: Mapping[str, Size | None],
    device: torch.device,
    folder: Path,
    *,
    weights: int | None = None,
    share: float | None = None,
) -> Budgets:
    """Read budgets: sizes ("32GiB", a count of bytes) or fractions ("50%", 0.5) of what there is.

    Args:
        given: ``host_memory``: a fraction is of the machine's memory, or of its cgroup's limit;
            ``device_memory``: of the device's; ``disk_scratch``: of what is free in ``folder``.
            What is None, or missing, is taken from the variables FT_HOST_MEMORY,
            FT_DEVICE_MEMORY and FT_DISK_SCRATCH.
        device: Where the model runs.
        folder: Where temporary files go; it, or a folder above it, exists.
        weights: The most bytes of weights where the model runs,
        share: or a part of what is there.

    Raises:
        RecipeError: No such size.
    """
    existing = next(p for p in (folder, *folder.parents) if p.exists())
    if share is not None:
        weights = int(share * _device_total(device))
    return Budgets(
        weights=weights,
        host=_budget("host_memory", given, _host_total),
        device=_budget("device_memory", given, lambda: _device_total(device)),
        disk=_budget("disk_scratch", given, lambda: shutil.disk_usage(existing).free),
    )


def _budget(name: str, given: Mapping[str, Size | None], total: Callable[[], int]) -> int | None:
    where, size = name, given.get(name)
    if size is None:
        where = f"{ENV_PREFIX}{name.upper()}"
        size = os.environ.get(where, "").strip() or None
    if size is None:
        return None
    fraction = size if isinstance(size, float) else None
    if isinstance(size, str) and (match := _FRACTION.fullmatch(size)):
        fraction = float(match[1]) / 100 if match[1] else float(match[2])
    if fraction is not None:
        if not 0 < fraction <= 1:
            raise RecipeError(f"{where} is {size!r}; a fraction is above 0 and at most 1 (100%)")
        return int(fraction * total())
    try:
        return parse_size(str(size))
    except RecipeError as error:
        raise RecipeError(f"{where}: {error}, or a fraction such as 50% or 0.5") from error


def _host_total() -> int:
    return host_memory()[1]


def _device_total(device: torch.device) -> int:
    if device.type == "cpu":
        return _host_total()
    return current_device(device.index or 0).memory_info().total
