"""The middle of an offload manager: it times units, and plans with the timings."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from torch import nn

from modelopt_lite.errors import OffloadError, StrategyComputeError
from modelopt_lite.offload.device import Device, Event
from modelopt_lite.offload.diagnostics import log_diagnostics
from modelopt_lite.offload.expertgroups import StackedExperts, split_to_fit
from modelopt_lite.offload.instrumentation import Components
from modelopt_lite.offload.managerstate import DEFAULT_MANAGER_NAME, ManagerState, Phase
from modelopt_lite.offload.passtiming import OffloadTiming, OffloadTimingReport
from modelopt_lite.offload.profile_io import (
    Profile,
    profile_folder,
    read_profile,
    save_profile,
)
from modelopt_lite.offload.replan import Replan, StrategyReplanStatus
from modelopt_lite.offload.tensors import TensorManager

log = logging.getLogger("modelopt_lite.offload")


class PlanningManager(ManagerState):
    """The part of `OffloadManager` that goes from timings to a plan."""

    def __init__(self, name: str = DEFAULT_MANAGER_NAME, *, device: Device | None = None) -> None:
        super().__init__(name, device=device)
        self._suspended = 0
        self._order: list[str] = []
        self._pending: list[tuple[str, Event, Event]] = []
        self._replan = Replan()
        self._replan_allowed = True
        self._profile: Profile | None = None  # for the next offload()
        self.components = Components()
        self.offload_timing: OffloadTiming | None = None

    def save_profile(self, dir: Path | str | None = None) -> Path:
        """Write what discovery and profiling found; see `profile_io.save_profile`."""
        return save_profile(self, dir)

    def load_profile(self, dir: Path | str | None = None, model: nn.Module | None = None) -> None:
        """Let the next `offload` begin in INFERENCE, with a profile.

        Args:
            dir: Of the profile. None: ``profile_storage_dir`` of the configuration.
            model: The model that it is for. None: the one that is offloaded now.

        Raises:
            OffloadConfigError: No directory.
            OffloadError: No model; no profile; it is damaged, or another model's: the message
                names the first difference. Patterns, device and torch are compared at `offload`.
        """
        model = self.model if model is None else model
        if model is None:
            raise OffloadError(
                f"manager {self.name!r} has no model to load a profile for; give load_profile() one"
            )
        profile = read_profile(profile_folder(self.config, dir))
        profile.check_model(model)
        self._profile = profile

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

    def request_strategy_replan(self, *, manual_update_state: bool = False) -> int:
        """Plan again with timings of the units as they run in INFERENCE, compiled or not.

        Args:
            manual_update_state: Only `update_state` counts passes, not the model's forward.

        Returns:
            Passes to run until the new plan is there; 0, with a warning, before INFERENCE, while a
            replan is going on, or where `offload_from_state` ruled replans out.
        """
        if not self.strategy_replan_status.can_request:
            log.warning("no replan in %s, replan %s", self.phase.name, self._replan.state)
            return 0
        self._replan = Replan.begin(self.eager_profiling_iters, manual=manual_update_state)
        return self._replan.left

    @property
    def strategy_replan_status(self) -> StrategyReplanStatus:
        """Whether a replan can be requested, is going on, and was applied."""
        allowed = self._replan_allowed and self.phase is Phase.INFERENCE
        return self._replan.status(can_request=allowed)

    def _split_experts(
        self, model: nn.Module, offloaded: Mapping[str, Sequence[str]], tensors: TensorManager
    ) -> list[StackedExperts]:
        """Have stacked experts brought in by groups, where units with them exceed the budget."""
        moving = {name for names in offloaded.values() for name in names}
        stays = [p for n, p in model.named_parameters() if n not in moving]
        resident = sum(t.numel() * t.element_size() for t in (*stays, *model.buffers()))
        found = split_to_fit(model, offloaded, self._budget(), resident, tensors.can_split)
        tensors.split(found)
        for each in found:
            log.info(
                "manager %s: the experts of %r are brought in %d of %d at a time",
                *(self.name, each.path, each.size, each.count),
            )
        return found

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

    def _to_inference(self) -> None:
        tensors = self._require("inference")
        tensors.infer(self._order, self._budget())
        self.phase, self._passes = Phase.INFERENCE, 0
        for note in tensors.plan.notes if tensors.plan else ():
            log.warning("manager %s: %s", self.name, note)
        if self.config.enable_diagnostics:
            log_diagnostics(self)
        if self.config.enable_instrumentation:
            usage = self.get_gpu_memory_usage()
            self.components.note(tensors.loader, blocks_bytes=usage.blocks_bytes)
            self.components.write(self, self.config.instrumentation_output_dir)

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

    # --- what is measured in INFERENCE

    def _observe(self, tensors: TensorManager) -> None:
        """Prepare to tell how the parts were made, and to time passes, as far as is wanted."""
        self.components = Components()
        config = {name: getattr(self.config, name) for name in type(self.config).model_fields}
        self.components.note(self, name=self.name)
        self.components.note(self.config, **config)
        self.components.note(self.device, name=self.device.name)
        self.components.note(tensors, units=[path for path, _ in self.offload_units()])
        self.components.note(tensors.strategy)
        if self.config.offload_timing == "off":
            return
        if self.config.offload_timing == "cuda_graph" and self.device.torch_device.type != "cuda":
            log.warning(
                "manager %s: offload_timing='cuda_graph' has no effect of its own on %s, which has "
                "no CUDA graphs; passes are measured as with 'eager'",
                *(self.name, self.device.name),
            )
        self.offload_timing = OffloadTiming(tensors.timeline)

    def reset_offload_timing(self) -> None:
        """Forget the passes that were timed."""
        if self.offload_timing is not None:
            self.offload_timing.reset()

    def update_offload_timing(self, replay_generation: int = -1) -> bool:
        """Read the timings of passes that are done by now; `update_state` does so, too.

        Args:
            replay_generation: A number >= 0 of the pass: nothing is read twice in a row for one.

        Returns:
            Whether a pass was added.
        """
        return self.offload_timing is not None and self.offload_timing.read(replay_generation)

    def collect_offload_timing(self) -> OffloadTimingReport | None:
        """Return what was timed; None without ``offload_timing``, or before the first pass."""
        return None if self.offload_timing is None else self.offload_timing.report()

    def dump_instrumentation(self, dir: Path | str | None = None) -> Path | None:
        """Write how the parts were made, and what was measured; see `Components.write`.

        Args:
            dir: None: ``instrumentation_output_dir`` of the configuration.
        """
        self._require("dump_instrumentation")
        return self.components.write(self, dir or self.config.instrumentation_output_dir)

    def _forget_timings(self) -> None:
        self._order, self._pending, self._replan = [], [], Replan()
        self._suspended, self._replan_allowed = 0, True
        self.offload_timing = None
