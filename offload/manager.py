"""The offload manager: from a model and a config to a model whose weights come and go.

NOT_INITIALIZED -> DISCOVERY -> PROFILING -> INFERENCE. Each forward of the root model is one pass;
`OffloadManager.update_state` tells of passes that do not go through it.
"""

from __future__ import annotations

import enum
import functools
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn

from modelopt_lite.errors import OffloadError
from modelopt_lite.offload.config import OffloadConfig
from modelopt_lite.offload.device import Device, Event, current_device
from modelopt_lite.offload.discovery import ModuleTracker
from modelopt_lite.offload.ledger import BLOCKS
from modelopt_lite.offload.selection import Selection, select
from modelopt_lite.offload.tensors import TensorManager
from modelopt_lite.offload.traps import (
    Trap,
    TrapDirect,
    TrapInfer,
    TrapInferDirect,
    WarmupTrap,
    WarmupTrapDirect,
)

log = logging.getLogger("modelopt_lite.offload")

DEFAULT_MANAGER_NAME = "default"


class Phase(enum.Enum):
    """Where a manager is in its life."""

    NOT_INITIALIZED = "not_initialized"
    DISCOVERY = "discovery"
    PROFILING = "profiling"
    INFERENCE = "inference"


@dataclass(frozen=True, slots=True)
class GPUMemoryUsage:
    """Bytes on the device: blocks that weights pass through, and weights that stay."""

    blocks_bytes: int
    unmapped_tensors_bytes: int

    @property
    def total_bytes(self) -> int:
        """Both together."""
        return self.blocks_bytes + self.unmapped_tensors_bytes


class OffloadManager:
    """Offloads one model.

    Args:
        name: Told in messages.
        device: Where units compute; None: the accelerator that the config names, or this machine's
            memory.

    Attributes:
        on_compute: Called with a label when its unit's forward has run; simulations use it.
    """

    def __init__(self, name: str = DEFAULT_MANAGER_NAME, *, device: Device | None = None) -> None:
        self.name = name
        self.config = OffloadConfig()
        self.phase = Phase.NOT_INITIALIZED
        self.model: nn.Module | None = None
        self.skip_discovery_honored: bool | None = None
        self.on_compute: Callable[[str], None] = lambda label: None
        self._thread = threading.get_ident()
        self._given_device = device
        self._device: Device | None = None
        self._selection: Selection | None = None
        self._tensor_manager: TensorManager | None = None
        self._tracker: ModuleTracker | None = None
        self._passes = 0
        self._suspended = 0
        self._order: list[str] = []
        self._pending: list[tuple[str, Event, Event]] = []
        self._undo: list[Callable[[], None]] = []
        self._in_pass = False

    def offload(self, model: nn.Module, config: OffloadConfig | None = None) -> nn.Module:
        """Offload a model in place and return it.

        Args:
            model: Its weights are in host memory. Inputs belong on ``device.torch_device``.
            config: None keeps the manager's.

        Raises:
            OffloadError: Nothing can be offloaded, the model is compiled as a whole, or this
                manager has a model already.
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
        self._device = self._given_device or current_device(self.config.gpu_device)
        self._selection = select(model, self.config.include_patterns, self.config.exclude_patterns)
        self._tell_and_check(self._selection)
        self._tensor_manager = TensorManager(model, self._selection, self.config, self._device)
        self.model = model
        try:
            self._tensor_manager.own_units()
            self._tensor_manager.place()
            self._patch(model)
            self._begin()
        except BaseException:
            self.release()
            raise
        return model

    def release(self) -> None:
        """Leave the model exactly as it was before `offload`. A second call does nothing."""
        if self._tracker is not None:
            self._tracker.remove()
            self._tracker = None
        while self._undo:
            self._undo.pop()()
        if self._tensor_manager is not None:
            self._tensor_manager.release()
        if self._device is not None and self._given_device is None:
            self._device.close()
        self.model = self._selection = self._tensor_manager = self._device = None
        self.phase = Phase.NOT_INITIALIZED
        self.skip_discovery_honored = None
        self._passes, self._order, self._pending = 0, [], []

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
        self._end_timeline()

    @property
    def iters_before_inference(self) -> int:
        """How many passes are left before INFERENCE."""
        if self.phase is Phase.INFERENCE:
            return 0
        profiling = max(1, self.config.profiling_iters)
        if self.phase is Phase.PROFILING:
            return profiling - self._passes
        return max(1, self.config.discovery_iters) - self._passes + profiling

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

    def _begin(self) -> None:
        self.phase = Phase.DISCOVERY
        assert self._selection is not None
        if self.config.skip_discovery:
            self.skip_discovery_honored = bool(self._selection.units)
            if self._selection.units:
                self._to_profiling()
                return
            log.warning("skip_discovery was asked for, but no unit is patched; discovering")
        elif not self._selection.units:
            assert self.model is not None
            self._tracker = ModuleTracker(self.model)
        self.skip_discovery_honored = self.skip_discovery_honored is not False

    def _to_profiling(self) -> None:
        tensors = self._require("profiling")
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
        plan = tensors.plan
        if plan is not None:
            for note in plan.notes:
                log.warning("manager %s: %s", self.name, note)

    def _budget(self) -> int | None:
        fraction = self.config.max_gpu_mem_fraction
        assert self._device is not None
        return None if fraction is None else int(self._device.memory_info().total * fraction)

    # --- traps

    def trap(self, label: str) -> AbstractContextManager[object]:
        """Return the context for one forward of a unit in the present phase."""
        tensors = self._require("trap")
        assert self._device is not None
        indirect = self.config.profile_mode == "torch_function"
        loader = tensors.loader
        if label not in self._order:
            self._order.append(label)
        made: Any
        if self.phase is Phase.INFERENCE:
            made = (TrapInfer if indirect else TrapInferDirect)(label, loader, self._computed)
        elif self.phase is Phase.PROFILING:
            kind = Trap if indirect else TrapDirect
            made = kind(label, loader, self._computed, self._device, self._time)
        else:
            made = (WarmupTrap if indirect else WarmupTrapDirect)(label, loader, self._computed)
        if indirect:
            table = tensors.table
            made.replace = lambda t: table.get(id(t), t)
        trap: AbstractContextManager[object] = made
        return trap

    @contextmanager
    def offload_block(self, block_name: str) -> Iterator[None]:
        """A trap around any code, where modules cannot be patched (manual trap).

        Raises:
            OffloadError: Before `offload`, or with ``skip_discovery``, which would leave unknown
                what the block reads.
        """
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
        tensors, device = self._require("timing"), self._device
        assert device is not None
        for label, start, end in self._pending:
            device.synchronize(end)
            tensors.layer_statistics_collector.record(label, max(device.elapsed(start, end), 0.0))
        self._pending.clear()

    # --- patching

    def _patch(self, model: nn.Module) -> None:
        assert self._selection is not None
        for path, module in self._selection.units.items():
            self._patch_forward(path, module)
        hook = model.register_forward_hook(lambda *_: self.update_state(), always_call=False)
        before = model.register_forward_pre_hook(lambda *_: self._begin_timeline())
        self._undo += [hook.remove, before.remove]
        self._guard(model)

    def _patch_forward(self, path: str, module: nn.Module) -> None:
        """Run a unit's forward inside of its trap; seed 002 names the marks."""
        original = module.forward
        own = "forward" in module.__dict__

        @functools.wraps(original)
        def forward(*args: Any, **kwargs: Any) -> Any:
            with self.trap(path):
                return original(*args, **kwargs)

        module.forward = forward
        module._ft_original_forward_func = original  # type: ignore[assignment]
        module._ft_offload_name = path  # type: ignore[assignment]

        def undo() -> None:
            if own:
                module.forward = original
            else:
                del module.forward
            del module._ft_original_forward_func, module._ft_offload_name

        self._undo.append(undo)

    def _guard(self, model: nn.Module) -> None:
        """Refuse what would move or copy weights behind the manager's back."""

        def refuse(*args: Any, **kwargs: Any) -> Any:
            raise OffloadError(
                "the model is offloaded: release() it before moving, casting or copying it"
            )

        for name in ("_apply", "__deepcopy__", "__reduce_ex__"):
            model.__dict__[name] = refuse
            self._undo.append(functools.partial(model.__dict__.pop, name, None))

    # --- looking

    def offload_units(self) -> tuple[tuple[str, nn.Module], ...]:
        """Return (path, module) of every unit."""
        return tuple(self._selection.units.items()) if self._selection else ()

    def resident_units(self) -> tuple[tuple[str, nn.Module], ...]:
        """Return (path, module) of the largest executable modules without a unit in them."""
        if self.model is None or self._selection is None:
            return ()
        return tuple(_without_units("", self.model, set(self._selection.units)))

    def get_gpu_memory_usage(self) -> GPUMemoryUsage:
        """Return the bytes on the device, in INFERENCE.

        Raises:
            OffloadError: Before INFERENCE.
        """
        if self.phase is not Phase.INFERENCE:
            raise OffloadError(
                f"memory use is settled in INFERENCE, and manager {self.name!r} is in "
                f"{self.phase.name}; run {self.iters_before_inference} more passes"
            )
        ledger = self._require("memory").ledger
        blocks = ledger.held(BLOCKS)["device"]
        return GPUMemoryUsage(blocks, ledger.total("device") - blocks)

    def get_tensor_manager(self) -> TensorManager | None:
        """Return what owns the tensors; None without a model."""
        return self._tensor_manager

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

    def _require(self, what: str) -> TensorManager:
        if self._tensor_manager is None:
            raise OffloadError(f"{what} needs a model: call offload(model, config) first")
        return self._tensor_manager

    def check_thread(self) -> None:
        """Raise `OffloadError` in a thread other than the one that made this manager."""
        if threading.get_ident() != self._thread:
            raise OffloadError(
                f"manager {self.name!r} belongs to thread {self._thread}, and thread "
                f"{threading.get_ident()} used it; give each thread a manager of its own"
            )

    def _begin_timeline(self) -> None:
        if self.phase is Phase.INFERENCE and self._tensor_manager is not None:
            self._tensor_manager.timeline.begin_pass()

    def _end_timeline(self) -> None:
        if self._tensor_manager is not None:
            self._tensor_manager.timeline.end_pass()


def _without_units(
    path: str, module: nn.Module, units: set[str]
) -> Iterator[tuple[str, nn.Module]]:
    if path in units:
        return
    inside = any(unit.startswith(f"{path}." if path else "") for unit in units)
    if not inside and path:
        yield path, module
        return
    for name, child in module.named_children():
        yield from _without_units(f"{path}.{name}" if path else name, child, units)
