"""Lockstep execution: many forward passes advance through a model together, one unit at a time.

A pass is suspended where it enters a unit (a greenlet switch inside the unit's forward pre-hook).
When every pass that can reach the unit waits there, its weights are brought in once, each pass runs
through it in turn, and its weights leave. The model's own forward code runs unchanged. A unit that
runs twice, or in another order in another pass, is brought in again; the order of the units only
says which to wait for where passes disagree.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from contextvars import copy_context
from dataclasses import dataclass, field
from typing import Any

import torch
from greenlet import getcurrent, greenlet
from torch import nn
from torch.overrides import (
    _get_current_function_mode_stack,
    _pop_mode,
    _push_mode,
)

from modelopt_lite.errors import InternalError
from modelopt_lite.offload.waiting import Waiting


@dataclass(slots=True)
class _Job:
    """One forward pass: its greenlet, where it waits, and what it has done."""

    index: int
    fiber: greenlet
    unit: str | None = None
    result: Any = None
    state: _TorchState | None = None


@dataclass(slots=True)
class _TorchState:
    """torch's modes, which belong to the thread and must follow the greenlet that set them."""

    grad: bool
    inference: bool
    default_dtype: torch.dtype
    autocast: dict[str, tuple[bool, torch.dtype]] = field(default_factory=dict)
    autocast_cache: bool = True
    modes: list[Any] = field(default_factory=list)

    @classmethod
    def capture(cls) -> _TorchState:
        devices = {"cpu"}
        if (accelerator := torch.accelerator.current_accelerator()) is not None:
            devices.add(accelerator.type)
        return cls(
            grad=torch.is_grad_enabled(),
            inference=torch.is_inference_mode_enabled(),
            default_dtype=torch.get_default_dtype(),
            autocast={
                d: (torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in devices
            },
            autocast_cache=torch.is_autocast_cache_enabled(),
            modes=_get_current_function_mode_stack(),
        )

    def restore(self) -> None:
        """Make the thread's state equal to this one.

        Inference mode has no setter; the pass must leave it as it found it between two units.
        """
        if torch.is_inference_mode_enabled() != self.inference:
            raise InternalError(
                "a forward pass changed torch's inference mode across units; run the whole model "
                "under one inference mode (no torch.inference_mode() around several layers)"
            )
        torch.set_grad_enabled(self.grad)
        torch.set_default_dtype(self.default_dtype)
        for device, (enabled, dtype) in self.autocast.items():
            torch.set_autocast_enabled(device, enabled)
            torch.set_autocast_dtype(device, dtype)
        torch.set_autocast_cache_enabled(self.autocast_cache)
        torch.clear_autocast_cache()  # holds casts to another pass's dtype, of weights that left
        if _get_current_function_mode_stack() != self.modes:
            while _get_current_function_mode_stack():
                _pop_mode()
            for mode in self.modes:
                _push_mode(mode)


class Lockstep:
    """Runs forward passes together over the units of one model.

    Args:
        units: Name -> module, best in the order in which they run: where passes wait at different
            units, the first of those is next. A unit inside another is part of the outer one.
        enter: Called with a unit's name before its first waiting pass runs; brings it in.
        leave: Called with its name when every pass that waited has left it.
        parts: Unit -> its parts, in the order in which they run. Where a pass asks for one with
            `want`, it is suspended there until all that ask for it do; the unit stays in.
        skips: Whether the current pass runs through the unit without its weights, and so does not
            wait for it; asked each time that a pass comes to a unit.
        waiting: Keeps what suspended passes hold within a budget.

    ``entries`` counts how often each unit was brought in; units inside others are not in it.
    """

    def __init__(
        self,
        units: Mapping[str, nn.Module],
        *,
        enter: Callable[[str], None],
        leave: Callable[[str], None],
        parts: Mapping[str, Sequence[str]] | None = None,
        skips: Callable[[str], bool] = lambda name: False,
        waiting: Waiting | None = None,
    ) -> None:
        inner = {id(m) for unit in units.values() for m in unit.modules() if m is not unit}
        self._units = {name: unit for name, unit in units.items() if id(unit) not in inner}
        self._order = {name: position for position, name in enumerate(self._units)}
        self._enter = enter
        self._leave = leave
        self._parts = parts or {}
        self._order |= {
            part: position for names in self._parts.values() for position, part in enumerate(names)
        }
        self._skips = skips
        self._waiting = waiting
        self._hub: greenlet | None = None
        self._jobs: dict[greenlet, _Job] = {}
        self.entries: dict[str, int] = dict.fromkeys(self._order, 0)

    def run(self, passes: Sequence[Callable[[], Any]]) -> list[Any]:
        """Run every pass to its end and return their results, in order.

        Raises:
            Exception: Whatever the first failing pass, ``enter`` or ``leave`` raised; the other
                passes are ended first, as by ``GreenletExit``, and what they raise then is dropped.
            InternalError: A pass changed torch's inference mode across units.
        """
        hooks = [
            module.register_forward_pre_hook(self._pre_hook(name), with_kwargs=True)
            for name, module in self._units.items()
        ]
        self._hub = getcurrent()
        jobs = [self._start(index, body) for index, body in enumerate(passes)]
        outside = _TorchState.capture()
        try:
            for job in jobs:
                self._resume(job, outside)
            while wanted := {job.unit for job in jobs if job.unit}:
                self._run_unit(min(wanted, key=self._order.__getitem__), jobs, outside)
        finally:
            self._hub = None  # a unit that an ending pass runs would have no weights
            self._abandon(jobs)
            for hook in hooks:
                hook.remove()
            self._jobs = {}
            outside.restore()
        return [job.result for job in jobs]

    @property
    def current(self) -> int:
        """The position of the pass that is running.

        Raises:
            InternalError: None is.
        """
        return self._current_job("a unit").index

    def _current_job(self, what: str) -> _Job:
        job = self._jobs.get(getcurrent())
        if job is None or self._hub is None:
            raise InternalError(
                f"{what} ran outside of a lockstep pass, from another thread or greenlet"
            )
        return job

    def _start(self, index: int, body: Callable[[], Any]) -> _Job:
        def main() -> None:
            job.result = body()

        job = _Job(index, greenlet(main))
        job.fiber.gr_context = copy_context()
        self._jobs[job.fiber] = job
        return job

    def want(self, part: str) -> None:
        """Suspend the current pass until a part of the unit that it runs is in memory."""
        self._suspend(self._current_job(f"part {part!r}"), part)

    def _suspend(
        self, job: _Job, name: str, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> None:
        job.unit = name
        if self._waiting is not None:
            self._waiting.suspend(job.index, args, kwargs or {})
        assert self._hub is not None
        self._hub.switch()
        if self._waiting is not None:
            self._waiting.resume(job.index)

    def _run_unit(self, name: str, jobs: list[_Job], outside: _TorchState) -> None:
        """Bring in a unit, and run all passes that wait for it until they have left it."""
        self.entries[name] += 1
        self._enter(name)
        for job in jobs:
            if job.unit == name:
                self._resume(job, outside)
        parts = self._parts.get(name, ())
        while wanted := {job.unit for job in jobs if job.unit and job.unit in parts}:
            self._run_unit(min(wanted, key=parts.index), jobs, outside)
        self._leave(name)

    def _resume(self, job: _Job, outside: _TorchState) -> None:
        """Run a pass until it waits for its next unit or ends."""
        job.unit = None
        if job.state is not None:
            job.state.restore()
        try:
            job.fiber.switch()
        finally:
            job.state = _TorchState.capture()
            outside.restore()

    def _pre_hook(self, name: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            job = self._current_job(f"unit {name!r}")
            if not self._skips(name):
                self._suspend(job, name, args, kwargs)

        return hook

    def _abandon(self, jobs: list[_Job]) -> None:
        """End passes that are still suspended, as after an error in another one.

        First the pass that changed inference mode, if any: it changes it back, which only it can.
        """
        inference = torch.is_inference_mode_enabled()
        for job in sorted(
            jobs, key=lambda job: job.state is None or job.state.inference != inference
        ):
            if job.fiber and not job.fiber.dead:
                with suppress(Exception):  # the error that ended the run is the one to see
                    if job.state is not None:
                        job.state.restore()
                    job.fiber.throw()
