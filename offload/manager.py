"""The offload manager: from a model and a config to a model whose weights come and go.

NOT_INITIALIZED -> DISCOVERY -> PROFILING -> INFERENCE. Each forward of the root model is one pass;
`OffloadManager.update_state` tells of passes that do not go through it.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch import nn

from modelopt_lite.errors import OffloadError, StrategyComputeError
from modelopt_lite.offload.config import OffloadConfig
from modelopt_lite.offload.device import Device, Event, current_device
from modelopt_lite.offload.diagnostics import log_diagnostics
from modelopt_lite.offload.discovery import ModuleTracker, OutsideReads
from modelopt_lite.offload.diskcargo import make_tensor_manager
from modelopt_lite.offload.managerstate import (
    DEFAULT_MANAGER_NAME,
    GPUMemoryUsage,
    ManagerState,
    Phase,
)
from modelopt_lite.offload.patching import CompileFn, Patches, uncompiled
from modelopt_lite.offload.replan import Replan, StrategyReplanStatus
from modelopt_lite.offload.selection import Selection, select
from modelopt_lite.offload.traps import (
    Trap,
    TrapDirect,
    TrapInfer,
    TrapInferDirect,
    WarmupTrap,
    WarmupTrapDirect,
)

__all__ = ["DEFAULT_MANAGER_NAME", "GPUMemoryUsage", "OffloadConfig", "OffloadManager", "Phase"]

log = logging.getLogger("modelopt_lite.offload")

_RUNS_ALONE = 3  # times that a unit runs outside of the model's forward before that is told


class OffloadManager(ManagerState):
    """Offloads one model. For arguments and attributes see `ManagerState`."""

    def __init__(self, name: str = DEFAULT_MANAGER_NAME, *, device: Device | None = None) -> None:
        super().__init__(name, device=device)
        self._suspended = self._depth = 0
        self._order: list[str] = []
        self._pending: list[tuple[str, Event, Event]] = []
        self._patches = Patches()
        self._replan = Replan()
        self._outside: OutsideReads | None = None
        self._tracker: ModuleTracker | None = None
        self._alone: Counter[str] = Counter()

    def offload(
        self,
        model: nn.Module,
        config: OffloadConfig | None = None,
        *,
        compile_fn: CompileFn | None = None,
    ) -> nn.Module:
        """Offload a model in place and return it.

        Args:
            model: Its weights are in host memory. Inputs belong on ``device.torch_device``.
            config: None keeps the manager's.
            compile_fn: Compiles a unit: module -> callable. One for which it fails runs as it is.

        Raises:
            OffloadError: Nothing can be offloaded, the model is compiled as a whole, it is
                offloaded by another manager, or this manager has a model already.
        """
        self.check_thread()
        if self.model is not None:
            raise OffloadError(
                f"manager {self.name!r} has a model already; release() it, or use another name"
            )
        if type(model).__name__ == "OptimizedModule":
            raise OffloadError("compile the units after offload(), not the model before it")
        self.config = config or self.config
        if not self.config.enabled:
            return model
        selection = select(model, self.config.include_patterns, self.config.exclude_patterns)
        self._tell_and_check(selection)
        if any("_ft_offload_name" in module.__dict__ for module in model.modules()):
            raise OffloadError("another manager has offloaded the model; release() that one first")
        try:
            self._selection, self.model = selection, model
            self._device = self._given_device or current_device(self.config.gpu_device)
            self._tensor_manager = make_tensor_manager(model, selection, self.config, self._device)
            self._tensor_manager.own_units()
            self._tensor_manager.place()
            for path, module in selection.units.items():
                self._patches.wrap_forward(path, module, self.trap, compile_fn)
            self._watch_passes(model)
            self._patches.guard(model)
            self._begin()
        except BaseException:
            self.release()
            raise
        return model

    def release(self) -> None:
        """Leave the model exactly as it was before `offload`. A second call does nothing."""
        if self._outside is not None:
            self._close_watch()
        if self._tracker is not None:
            self._tracker.remove()
        if self._tensor_manager is not None:
            self._tensor_manager.release()
        self._patches.undo()
        if self._device is not None and self._given_device is None:
            self._device.close()
        self.model = self._selection = self._tensor_manager = self._device = self._tracker = None
        self.phase = Phase.NOT_INITIALIZED
        self.skip_discovery_honored = None
        self._passes = self._suspended = self._depth = 0
        self._order, self._pending, self._replan = [], [], Replan()
        self._alone.clear()

    # --- passes and phases

    def update_state(self) -> None:
        """Count one pass, and go to the next phase where that was the last of this one."""
        self.check_thread()
        if self.phase is Phase.DISCOVERY:
            self._passes += 1
            if self._passes >= max(1, self.config.discovery_iters):
                self._to_profiling()
        elif self.phase is Phase.PROFILING and not self._suspended:
            self._settle()
            self._passes += 1
            if self._passes >= max(1, self.config.profiling_iters):
                self._to_inference()
        elif self._replan.left:
            self._settle()
            if self._replan.count():
                self._apply_replan()
        self._alone.clear()
        if self._tensor_manager is not None:
            self._tensor_manager.timeline.end_pass()

    def suspend_profiling(self) -> None:
        """Stop to count and time passes until `resume_profiling` is called as often."""
        self._require("suspend_profiling")
        self._suspended += 1

    def resume_profiling(self) -> None:
        """Undo one `suspend_profiling`."""
        self._require("resume_profiling")
        if not self._suspended:
            raise OffloadError("resume_profiling without a suspend_profiling before it")
        self._suspended -= 1

    @contextmanager
    def pause_profiling(self) -> Iterator[None]:
        """Suspend profiling inside of a block."""
        self.suspend_profiling()
        try:
            yield
        finally:
            self.resume_profiling()

    def clear_profiling_durations(self) -> None:
        """Forget the timings so far."""
        self._require("clear_profiling_durations").layer_statistics_collector.clear_durations()

    def sync_prev_onload(self) -> None:
        """Let the compute stream wait for all copies that are on their way."""
        self._require("sync_prev_onload").loader.join()

    join_after_forward = sync_prev_onload

    def request_strategy_replan(self, *, manual_update_state: bool = False) -> int:
        """Plan again with timings of the units as they run in INFERENCE, compiled or not.

        Args:
            manual_update_state: Only `update_state` counts passes, not the model's forward.

        Returns:
            Passes to run until the new plan is there; 0, with a warning, before INFERENCE or while
            a replan is going on.
        """
        if not self.strategy_replan_status.can_request:
            log.warning("no replan in %s, replan %s", self.phase.name, self._replan.state)
            return 0
        self._replan = Replan.begin(self.eager_profiling_iters, manual=manual_update_state)
        return self._replan.left

    @property
    def strategy_replan_status(self) -> StrategyReplanStatus:
        """Whether a replan can be requested, is going on, and was applied."""
        return self._replan.status(can_request=self.phase is Phase.INFERENCE)

    def adopt_timings(self, samples: Mapping[str, Sequence[float]]) -> None:
        """Go to INFERENCE at once, with timings (ms by label, in order) of an earlier run."""
        tensors = self._require("adopt_timings")
        for label, times in samples.items():
            for ms in times:
                tensors.layer_statistics_collector.record(label, ms)
        self._order = [*samples, *(label for label in self._order if label not in samples)]
        self._to_inference()

    def _apply_replan(self) -> None:
        tensors = self._require("replan")
        collector = tensors.layer_statistics_collector
        before = collector.samples()
        collector.clear_durations()
        for label, times in (before | self._replan.samples).items():
            for ms in times:
                collector.record(label, ms)
        try:
            tensors.infer(self._order, self._budget())
        except StrategyComputeError as error:
            log.error("manager %s: the replan failed, the old plan stays: %s", self.name, error)
            self._replan.end(applied=False)
        else:
            self._replan.end(applied=True)

    def _begin(self) -> None:
        self.phase = Phase.DISCOVERY
        assert self._selection is not None
        self.skip_discovery_honored = True
        if self.config.skip_discovery:
            if self._selection.units:
                self._to_profiling()
                return
            self.skip_discovery_honored = False
            log.warning("skip_discovery was asked for, but no unit is patched; discovering")
        if not self._selection.units:
            assert self.model is not None
            self._tracker = ModuleTracker(self.model)

    def _to_profiling(self) -> None:
        tensors = self._require("profiling")
        if self._outside is not None:
            self._close_watch()
        if self._tracker is not None:
            tensors.observed(self._tracker)
            self._tracker.remove()
            self._tracker = None
            tensors.place()
        self.phase, self._passes = Phase.PROFILING, 0
        log.info("manager %s: profiling %d labels", self.name, len(tensors.labels))

    def _to_inference(self) -> None:
        tensors = self._require("inference")
        tensors.infer(self._order, self._budget())
        self.phase, self._passes = Phase.INFERENCE, 0
        for note in tensors.plan.notes if tensors.plan else ():
            log.warning("manager %s: %s", self.name, note)
        if self.config.enable_diagnostics:
            log_diagnostics(self)

    def _watch_passes(self, model: nn.Module) -> None:
        """Count forwards of the model; look at what they read while discovering."""

        @uncompiled
        def before(*_: Any) -> None:
            self._depth += 1
            if self._depth > 1:
                return
            tensors = self._require("a pass")
            if self.phase is Phase.INFERENCE and self.config.enable_diagnostics:
                tensors.timeline.begin_pass()
            elif self.phase is Phase.DISCOVERY and self._outside is None:
                self._outside = tensors.watch()
                self._outside.__enter__()

        @uncompiled
        def after(*_: Any) -> None:
            self._depth = max(self._depth - 1, 0)
            if not self._depth and self._outside is not None:
                self._close_watch()

        @uncompiled
        def passed(*_: Any) -> None:
            if not self._depth and not (self._replan.left and self._replan.manual):
                self.update_state()

        for handle in (
            model.register_forward_pre_hook(before),
            model.register_forward_hook(after, always_call=True),
            model.register_forward_hook(passed),
        ):
            self._patches.on_undo(handle.remove)

    def _close_watch(self) -> None:
        """Keep resident what the pass read outside of its unit."""
        watch, self._outside = self._outside, None
        assert watch is not None
        watch.__exit__(None, None, None)
        if watch.found:
            tensors = self._require("discovery")
            names = tensors.keep_resident(frozenset(watch.found))
            log.warning("manager %s: %s read outside of their units; resident", self.name, names)
            tensors.place()

    # --- traps

    def trap(self, label: str) -> AbstractContextManager[object]:
        """Return the context for one forward of a unit in the present phase."""
        self.check_thread()
        tensors = self._require("trap")
        assert self._device is not None
        self._notice_alone(label)
        indirect = self.config.profile_mode == "torch_function"
        loader = tensors.loader
        if label not in self._order:
            self._order.append(label)
        made: Any
        if self.phase is Phase.INFERENCE and not self._replan.timing:
            made = (TrapInfer if indirect else TrapInferDirect)(label, loader, self._computed)
        elif self.phase is not Phase.DISCOVERY:
            kind = Trap if indirect else TrapDirect
            made = kind(label, loader, self._computed, self._device, self._time)
        else:
            made = (WarmupTrap if indirect else WarmupTrapDirect)(label, loader, self._computed)
        if indirect:
            table = tensors.table
            made.replace = lambda t: table.get(id(t), t)
        if self.phase is Phase.INFERENCE and self.config.enable_diagnostics:
            made = tensors.timeline.around(made, label)
        trap: AbstractContextManager[object] = made
        return trap

    def _notice_alone(self, label: str) -> None:
        """Warn where units run but no pass is ever counted."""
        if self._depth or self.phase is Phase.INFERENCE:
            return
        self._alone[label] += 1
        if self._alone[label] == _RUNS_ALONE:
            log.warning(
                "manager %s: %r ran %d times without a forward of the whole model; call "
                "update_state() after each pass, or it stays in %s",
                *(self.name, label, _RUNS_ALONE, self.phase.name),
            )

    @contextmanager
    def offload_block(self, block_name: str) -> Iterator[None]:
        """A trap around any code, where modules cannot be patched (manual trap).

        Raises:
            OffloadError: Before `offload`, or with ``skip_discovery``, which would leave unknown
                what the block reads.
        """
        if not self.config.enabled and self.model is None:
            yield
            return
        self._require("offload_block")
        if self.config.skip_discovery and self.skip_discovery_honored:
            raise OffloadError(
                f"offload_block({block_name!r}) needs discovery to see what it reads; set "
                "skip_discovery=False"
            )
        if self._tracker is not None:
            self._tracker.enter_trap(block_name)
        try:
            with self.trap(block_name):
                yield
        finally:
            if self._tracker is not None:
                self._tracker.exit_trap()

    def _computed(self, label: str) -> None:
        self.on_compute(label)

    def _time(self, label: str, start: Event, end: Event) -> None:
        if not self._suspended:
            self._pending.append((label, start, end))

    def _settle(self) -> None:
        """Read the timings of the pass that ended."""
        collector, device = self._require("timing").layer_statistics_collector, self._device
        assert device is not None
        record = self._replan.record if self._replan.left else collector.record
        for label, start, end in self._pending:
            device.synchronize(end)
            record(label, max(device.elapsed(start, end), 0.0))
        self._pending.clear()

    def _tell_and_check(self, selection: Selection) -> None:
        for field in self.config.without_effect():
            log.warning("manager %s: %s has no effect in this release", self.name, field)
        for note in selection.warnings:
            log.log(logging.getLevelName(note.level), "manager %s: %s", self.name, note.message)
        manual = not self.config.include_patterns
        if not manual and not any(selection.offloaded.values()):
            raise OffloadError(
                f"nothing is offloaded: include_patterns {self.config.include_patterns} and "
                f"exclude_patterns {self.config.exclude_patterns} leave no parameter in any unit; "
                + (selection.warnings[0].message if selection.warnings else "change them")
            )
