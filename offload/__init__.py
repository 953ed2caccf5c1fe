"""Run a model whose weights do not fit: bring them in unit by unit, from disk or host memory.

Imported as ``modelopt_lite.offload``. `offload` runs any model for inference with its weights
elsewhere; `Lockstep` advances many batches through a model together, so that each unit's weights
are brought in once for all of them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if __name__ == "offload":
    raise ImportError(
        "import modelopt_lite.offload, not offload: the folder at the top of the checkout is the "
        "same package under another name, and two copies of it would be made"
    )

if TYPE_CHECKING:
    from modelopt_lite.offload.api import (
        clear_profiling_durations,
        collect_offload_timing,
        dump_instrumentation,
        get_gpu_memory_usage,
        get_offload_manager,
        init,
        load_profile,
        offload,
        offload_block,
        offload_from_profile,
        offload_from_state,
        offload_units,
        pause_profiling,
        release,
        request_strategy_replan,
        reset_offload_timing,
        resident_units,
        resume_profiling,
        save_profile,
        set_config,
        strategy_replan_status,
        suspend_profiling,
        sync_prev_onload,
        update_offload_timing,
        update_state,
    )
    from modelopt_lite.offload.cargo import (
        get_inner_tensor_field_ids,
    )
    from modelopt_lite.offload.config import (
        OffloadConfig,
    )
    from modelopt_lite.offload.config_sources import (
        load_config,
        load_config_from_env,
        load_config_from_file,
    )
    from modelopt_lite.offload.device import (
        Device,
        HostDevice,
        current_device,
    )
    from modelopt_lite.offload.frommeta import (
        load_model_from_profile,
    )
    from modelopt_lite.offload.lockstep import (
        Lockstep,
    )
    from modelopt_lite.offload.manager import (
        GPUMemoryUsage,
        OffloadManager,
        Phase,
    )
    from modelopt_lite.offload.managerstate import (
        DEFAULT_MANAGER_NAME,
    )
    from modelopt_lite.offload.passtiming import (
        OffloadTimingReport,
        OffloadTimingSnapshot,
        format_offload_timing_table,
    )
    from modelopt_lite.offload.profile_io import (
        Profile,
    )
    from modelopt_lite.offload.replan import (
        StrategyReplanStatus,
    )
    from modelopt_lite.offload.selection import (
        Selection,
        select,
    )
    from modelopt_lite.offload.sharedfile import (
        cleanup_unused,
    )
    from modelopt_lite.offload.store import (
        WeightStore,
    )
    from modelopt_lite.offload.tensors import (
        TensorManager,
    )
    from modelopt_lite.offload.units import (
        Unit,
        find_units,
    )

# Loaded on first use: patterns and configs are needed where torch is not.
_WHERE = {
    "DEFAULT_MANAGER_NAME": "managerstate",
    "Device": "device",
    "GPUMemoryUsage": "manager",
    "HostDevice": "device",
    "Lockstep": "lockstep",
    "OffloadConfig": "config",
    "OffloadManager": "manager",
    "OffloadTimingReport": "passtiming",
    "OffloadTimingSnapshot": "passtiming",
    "Phase": "manager",
    "Profile": "profile_io",
    "Selection": "selection",
    "StrategyReplanStatus": "replan",
    "TensorManager": "tensors",
    "Unit": "units",
    "WeightStore": "store",
    "cleanup_unused": "sharedfile",
    "clear_profiling_durations": "api",
    "collect_offload_timing": "api",
    "current_device": "device",
    "dump_instrumentation": "api",
    "find_units": "units",
    "format_offload_timing_table": "passtiming",
    "get_gpu_memory_usage": "api",
    "get_inner_tensor_field_ids": "cargo",
    "get_offload_manager": "api",
    "init": "api",
    "load_config": "config_sources",
    "load_config_from_env": "config_sources",
    "load_config_from_file": "config_sources",
    "load_model_from_profile": "frommeta",
    "load_profile": "api",
    "offload": "api",
    "offload_block": "api",
    "offload_from_profile": "api",
    "offload_from_state": "api",
    "offload_units": "api",
    "pause_profiling": "api",
    "release": "api",
    "request_strategy_replan": "api",
    "reset_offload_timing": "api",
    "resident_units": "api",
    "resume_profiling": "api",
    "save_profile": "api",
    "select": "selection",
    "set_config": "api",
    "strategy_replan_status": "api",
    "suspend_profiling": "api",
    "sync_prev_onload": "api",
    "update_offload_timing": "api",
    "update_state": "api",
}
__all__ = [
    "DEFAULT_MANAGER_NAME",
    "Device",
    "GPUMemoryUsage",
    "HostDevice",
    "Lockstep",
    "OffloadConfig",
    "OffloadManager",
    "OffloadTimingReport",
    "OffloadTimingSnapshot",
    "Phase",
    "Profile",
    "Selection",
    "StrategyReplanStatus",
    "TensorManager",
    "Unit",
    "WeightStore",
    "cleanup_unused",
    "clear_profiling_durations",
    "collect_offload_timing",
    "current_device",
    "dump_instrumentation",
    "find_units",
    "format_offload_timing_table",
    "get_gpu_memory_usage",
    "get_inner_tensor_field_ids",
    "get_offload_manager",
    "init",
    "load_config",
    "load_config_from_env",
    "load_config_from_file",
    "load_model_from_profile",
    "load_profile",
    "offload",
    "offload_block",
    "offload_from_profile",
    "offload_from_state",
    "offload_units",
    "pause_profiling",
    "release",
    "request_strategy_replan",
    "reset_offload_timing",
    "resident_units",
    "resume_profiling",
    "save_profile",
    "select",
    "set_config",
    "strategy_replan_status",
    "suspend_profiling",
    "sync_prev_onload",
    "update_offload_timing",
    "update_state",
]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'modelopt_lite.offload' has no attribute {name!r}")
    return getattr(importlib.import_module(f"modelopt_lite.offload.{_WHERE[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
