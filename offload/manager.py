"""The offload manager: from a model and a config to a model whose weights come and go.

NOT_INITIALIZED -> DISCOVERY -> PROFILING -> INFERENCE. Each forward of the root model is one pass;
`OffloadManager.update_state` tells of passes that do not go through it.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from torch import nn

from modelopt_lite.errors import OffloadError
from modelopt_lite.offload.config import OffloadConfig
from modelopt_lite.offload.device import Device, current_device
from modelopt_lite.offload.discovery import ModuleTracker, OutsideReads
from modelopt_lite.offload.diskcargo import make_tensor_manager
from modelopt_lite.offload.expertgroups import without
from modelopt_lite.offload.managerplan import PlanningManager
from modelopt_lite.offload.managerstate import DEFAULT_MANAGER_NAME, GPUMemoryUsage, Phase
from modelopt_lite.offload.patching import CompileFn, Patches, uncompiled
from modelopt_lite.offload.profile_io import Profile, profile_folder, read_profile
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


class OffloadManager(PlanningManager):
    """Offloads one model. For arguments and attributes see `ManagerState`."""

    def __init__(self, name: str = DEFAULT_MANAGER_NAME, *, device: Device | None = None) -> None:
        super().__init__(name, device=device)
        self._depth = 0
        self._patches = Patches()
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
        profile, self._profile = self._profile, None
        return self._offload(model, config, compile_fn, profile)

    def offload_from_profile(
        self,
        model: nn.Module,
        profile_directory: Path | str | None = None,
        config: OffloadConfig | None = None,
        *,
        compile_fn: CompileFn | None = None,
    ) -> nn.Module:
        """Offload a model and begin in INFERENCE, with the timings of an earlier run.

        The plan is made anew from them, for the budget and strategy of this configuration.

        Args:
            model: As for `offload`.
            profile_directory: None: ``profile_storage_dir`` of the configuration.
            config: None keeps the manager's.
            compile_fn: As for `offload`.

        Raises:
            OffloadError: There is no profile, or it does not fit (the message names the first
                difference); the model is left as it was. Or as in `offload`.
            StrategyComputeError: The budget cannot be met.
        """
        profile = read_profile(profile_folder(config or self.config, profile_directory))
        return self._offload(model, config, compile_fn, profile)

    def offload_from_state(
        self,
        model: nn.Module,
        state: Profile,
        config: OffloadConfig | None = None,
        *,
        allow_strategy_replan: bool = True,
    ) -> nn.Module:
        """Do the same with a profile in memory, as `Profile.of` gathers it from another manager.

        Args:
            model: Its tensors may be in host memory or on the device already.
            state: What is known of it.
            config: None keeps the manager's.
            allow_strategy_replan: Whether `request_strategy_replan` may change the plan later.

        Raises:
            OffloadError: As in `offload_from_profile`.
            StrategyComputeError: As there.
        """
        self._offload(model, config, None, state)
        self._replan_allowed = allow_strategy_replan
        return model

    def _offload(
        self,
        model: nn.Module,
        config: OffloadConfig | None,
        compile_fn: CompileFn | None,
        profile: Profile | None,
    ) -> nn.Module:
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
            if profile is not None:
                profile.check(model, self.config, self._device.name)
            tensors = make_tensor_manager(model, selection, self.config, self._device)
            self._tensor_manager = tensors
            self._observe(tensors)
            split = self._split_experts(model, selection.offloaded, tensors)
            owned = selection.offloaded if profile is None else profile.owned(model)
            tensors.assign(without(owned, split))
            tensors.place()
            for experts in split:
                self._patches.wrap_inside(experts.module, tensors.serve(experts, self.trap))
            for path, module in selection.units.items():
                self._patches.wrap_forward(path, module, self.trap, self._block_of, compile_fn)
            self._watch_passes(model)
            self._patches.guard(model)
            self._begin(profile)
        except BaseException:
            self.release()
            raise
        return model

    def release(self, *, preserve_model: bool = True) -> None:
        """Leave the model exactly as it was before `offload`. A second call does nothing.

        Args:
            preserve_model: False leaves it without values: every parameter is empty, and nothing
                is copied back, so that the memory is free at once. Weights on disk rest there.
        """
        if self._outside is not None:
            self._close_watch()
        if self._tracker is not None:
            self._tracker.remove()
        if self._tensor_manager is not None:
            self._tensor_manager.release(keep=preserve_model)
        self._patches.undo()
        if self._device is not None and self._given_device is None:
            self._device.close()
        self.model = self._selection = self._tensor_manager = self._device = self._tracker = None
        self.phase = Phase.NOT_INITIALIZED
        self.skip_discovery_honored = None
        self._passes = self._depth = 0
        self._generation = -1
        self._forget_timings()
        self._alone.clear()

    # --- passes and phases

    def update_state(self, *, replay_generation: int = -1) -> None:
        """Count one pass, and go to the next phase where that was the last of this one.

        Args:
            replay_generation: A number >= 0 of the pass: told twice in a row, it counts once. So
                whoever replays a captured graph may tell of it beside the model's own hook.
        """
        self.check_thread()
        if replay_generation >= 0 and replay_generation == self._generation:
            return
        self._generation = replay_generation
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
        if self.offload_timing is not None:
            self.offload_timing.read(tell=True)

    def sync_prev_onload(self) -> None:
        """Let the compute stream wait for all copies that are on their way."""
        self._require("sync_prev_onload").loader.join()

    join_after_forward = sync_prev_onload

    def _begin(self, profile: Profile | None) -> None:
        self.phase = Phase.DISCOVERY
        assert self._selection is not None
        self.skip_discovery_honored = True
        if profile is not None:
            self.adopt_timings(profile.samples_ms)
            return
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

    def _watch_passes(self, model: nn.Module) -> None:
        """Count forwards of the model; look at what they read while discovering."""

        @uncompiled
        def before(*_: Any) -> None:
            self.check_thread()
            self._depth += 1
            if self._depth > 1:
                return
            tensors = self._require("a pass")
            if self.phase is Phase.INFERENCE and self.config.records_passes:
                tensors.timeline.begin_pass()
            elif self.phase is Phase.DISCOVERY and self._outside is None:
                self._outside = tensors.watch()
                self._outside.__enter__()

        @uncompiled
        def after(*_: Any) -> None:
            if not self.in_own_thread:  # `before` has refused
                return
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
        if tensors.moves(label) and self._device.capturing():
            raise OffloadError(
                f"a graph is being captured through {label!r}, whose weights are brought in by "
                "copies that a replay would not repeat; capture what a unit computes instead, with "
                "compile_fn"
            )
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
        if self.config.records_passes:
            if self.phase is Phase.INFERENCE and not tensors.timeline.in_pass:
                tensors.timeline.begin_pass()  # one that does not go through the model's forward
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

    def _block_of(self, label: str) -> int | None:
        return self._require("a unit").loader.block_of(label)

    def _computed(self, label: str) -> None:
        self.on_compute(label)

    def _tell_and_check(self, selection: Selection) -> None:
        for note in selection.warnings:
            log.log(logging.getLevelName(note.level), "manager %s: %s", self.name, note.message)
        manual = not self.config.include_patterns
        if not manual and not any(selection.offloaded.values()):
            raise OffloadError(
                f"nothing is offloaded: include_patterns {self.config.include_patterns} and "
                f"exclude_patterns {self.config.exclude_patterns} leave no parameter in any unit; "
                + (selection.warnings[0].message if selection.warnings else "change them")
            )
