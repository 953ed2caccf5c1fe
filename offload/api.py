"""The module-level names of the seeds: each works on the manager of a name."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager
from pathlib import Path

from torch import nn

from modelopt_lite.offload.config import OffloadConfig
from modelopt_lite.offload.manager import (
    DEFAULT_MANAGER_NAME,
    GPUMemoryUsage,
    OffloadManager,
)
from modelopt_lite.offload.passtiming import OffloadTimingReport
from modelopt_lite.offload.patching import CompileFn
from modelopt_lite.offload.profile_io import Profile
from modelopt_lite.offload.replan import StrategyReplanStatus

_managers: dict[str, OffloadManager] = {}
_lock = threading.Lock()


def get_offload_manager(name: str = DEFAULT_MANAGER_NAME) -> OffloadManager:
    """Return the manager of a name, made at its first use. It belongs to the thread that made it.

    Raises:
        OffloadError: Another thread made it.
    """
    with _lock:
        manager = _managers.setdefault(name, OffloadManager(name))
    manager.check_thread()
    return manager


def init(config: OffloadConfig | None = None, name: str = DEFAULT_MANAGER_NAME) -> None:
    """Set the config that `offload` will use; see `OffloadManager.set_config`."""
    manager = get_offload_manager(name)
    manager.set_config(config or manager.config)


def set_config(config: OffloadConfig, name: str = DEFAULT_MANAGER_NAME) -> None:
    """Replace the config of a manager.

    Raises:
        OffloadError: A model is offloaded, and what would change cannot any more.
    """
    get_offload_manager(name).set_config(config)


def offload(
    model: nn.Module,
    config: OffloadConfig | None = None,
    name: str = DEFAULT_MANAGER_NAME,
    compile_fn: CompileFn | None = None,
) -> nn.Module:
    """Offload a model in place: its units' weights come to the device when they run.

    Args:
        model: Any model, its weights in host memory.
        config: What to offload and how; None keeps the manager's (at first the defaults).
        name: Of the manager; each model needs one of its own.
        compile_fn: Compiles a unit: module -> callable.

    Returns:
        The same model. The first passes discover and time; then a strategy takes over.

    Raises:
        OffloadError: Nothing can be offloaded, or the manager has a model already.
    """
    return get_offload_manager(name).offload(model, config, compile_fn=compile_fn)


def release(name: str = DEFAULT_MANAGER_NAME, *, preserve_model: bool = True) -> None:
    """Leave the model of a manager exactly as it was; or without values, where not preserved."""
    get_offload_manager(name).release(preserve_model=preserve_model)


def save_profile(dir: Path | str | None = None, name: str = DEFAULT_MANAGER_NAME) -> Path:
    """Write what discovery and profiling found, to begin with it another time.

    Args:
        dir: A folder, made where it does not exist. None: ``profile_storage_dir``.
        name: Of the manager.

    Returns:
        The file, ``profile.json``.

    Raises:
        OffloadConfigError: No folder, or ``profile_read_only``.
        OffloadError: Before INFERENCE.
    """
    return get_offload_manager(name).save_profile(dir)


def load_profile(
    dir: Path | str | None = None,
    model: nn.Module | None = None,
    name: str = DEFAULT_MANAGER_NAME,
) -> None:
    """Let the next `offload` begin in INFERENCE; see `OffloadManager.load_profile`."""
    get_offload_manager(name).load_profile(dir, model)


def offload_from_profile(
    model: nn.Module,
    profile_directory: Path | str | None = None,
    config: OffloadConfig | None = None,
    name: str = DEFAULT_MANAGER_NAME,
    compile_fn: CompileFn | None = None,
) -> nn.Module:
    """Offload and begin in INFERENCE, without a pass; see `OffloadManager.offload_from_profile`."""
    manager = get_offload_manager(name)
    return manager.offload_from_profile(model, profile_directory, config, compile_fn=compile_fn)


def offload_from_state(
    model: nn.Module,
    state: Profile,
    config: OffloadConfig | None = None,
    name: str = DEFAULT_MANAGER_NAME,
    *,
    allow_strategy_replan: bool = True,
) -> nn.Module:
    """Do so with a profile in memory; see `OffloadManager.offload_from_state`."""
    manager = get_offload_manager(name)
    return manager.offload_from_state(
        model, state, config, allow_strategy_replan=allow_strategy_replan
    )


def offload_block(
    block_name: str, name: str = DEFAULT_MANAGER_NAME
) -> AbstractContextManager[None]:
    """A trap around any code (manual trap)."""
    return get_offload_manager(name).offload_block(block_name)


def offload_units(name: str = DEFAULT_MANAGER_NAME) -> tuple[tuple[str, nn.Module], ...]:
    """Return (path, module) of every unit."""
    return get_offload_manager(name).offload_units()


def resident_units(name: str = DEFAULT_MANAGER_NAME) -> tuple[tuple[str, nn.Module], ...]:
    """Return (path, module) of the largest executable modules without a unit in them."""
    return get_offload_manager(name).resident_units()


def get_gpu_memory_usage(name: str = DEFAULT_MANAGER_NAME) -> GPUMemoryUsage:
    """Return the bytes on the device, in INFERENCE."""
    return get_offload_manager(name).get_gpu_memory_usage()


def update_state(name: str = DEFAULT_MANAGER_NAME, *, replay_generation: int = -1) -> None:
    """Count one pass that did not go through the root model's forward."""
    get_offload_manager(name).update_state(replay_generation=replay_generation)


def request_strategy_replan(
    name: str = DEFAULT_MANAGER_NAME, *, manual_update_state: bool = False
) -> int:
    """Plan again with timings from INFERENCE; return how many passes that takes."""
    manager = get_offload_manager(name)
    return manager.request_strategy_replan(manual_update_state=manual_update_state)


def strategy_replan_status(name: str = DEFAULT_MANAGER_NAME) -> StrategyReplanStatus:
    """Return whether a replan can be requested, is going on, and was applied."""
    return get_offload_manager(name).strategy_replan_status


def suspend_profiling(name: str = DEFAULT_MANAGER_NAME) -> None:
    """Stop to count and time passes until `resume_profiling` is called as often."""
    get_offload_manager(name).suspend_profiling()


def resume_profiling(name: str = DEFAULT_MANAGER_NAME) -> None:
    """Undo one `suspend_profiling`."""
    get_offload_manager(name).resume_profiling()


def pause_profiling(name: str = DEFAULT_MANAGER_NAME) -> AbstractContextManager[None]:
    """Suspend profiling inside of a block."""
    return get_offload_manager(name).pause_profiling()


def clear_profiling_durations(name: str = DEFAULT_MANAGER_NAME) -> None:
    """Forget the timings so far."""
    get_offload_manager(name).clear_profiling_durations()


def sync_prev_onload(name: str = DEFAULT_MANAGER_NAME) -> None:
    """Let the compute stream wait for all copies that are on their way."""
    get_offload_manager(name).sync_prev_onload()


def reset_offload_timing(name: str = DEFAULT_MANAGER_NAME) -> None:
    """Forget the passes that were timed."""
    get_offload_manager(name).reset_offload_timing()


def update_offload_timing(replay_generation: int = -1, name: str = DEFAULT_MANAGER_NAME) -> bool:
    """Read the timings of passes that are done by now; return whether there was one."""
    return get_offload_manager(name).update_offload_timing(replay_generation)


def collect_offload_timing(name: str = DEFAULT_MANAGER_NAME) -> OffloadTimingReport | None:
    """Return what was timed in INFERENCE; None where nothing was."""
    return get_offload_manager(name).collect_offload_timing()


def dump_instrumentation(
    dir: Path | str | None = None, name: str = DEFAULT_MANAGER_NAME
) -> Path | None:
    """Write how the parts of a manager were made, and what was measured, as JSON."""
    return get_offload_manager(name).dump_instrumentation(dir)
