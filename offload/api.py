"""The module-level names of the seeds: each works on the manager of a name."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager

from torch import nn

from modelopt_lite.offload.config import OffloadConfig
from modelopt_lite.offload.manager import (
    DEFAULT_MANAGER_NAME,
    GPUMemoryUsage,
    OffloadManager,
)

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


def offload(
    model: nn.Module, config: OffloadConfig | None = None, name: str = DEFAULT_MANAGER_NAME
) -> nn.Module:
    """Offload a model in place: its units' weights come to the device when they run.

    Args:
        model: Any model, its weights in host memory.
        config: What to offload and how; None keeps the manager's (at first the defaults).
        name: Of the manager; each model needs one of its own.

    Returns:
        The same model. The first passes discover and time; then a strategy takes over.

    Raises:
        OffloadError: Nothing can be offloaded, or the manager has a model already.
    """
    return get_offload_manager(name).offload(model, config)


def release(name: str = DEFAULT_MANAGER_NAME) -> None:
    """Leave the model of a manager exactly as it was."""
    get_offload_manager(name).release()


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


def update_state(name: str = DEFAULT_MANAGER_NAME) -> None:
    """Count one pass that did not go through the root model's forward."""
    get_offload_manager(name).update_state()
