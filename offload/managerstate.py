"""What an offload manager knows of itself: phase, model, bytes, and whose thread it is."""

from __future__ import annotations

import enum
import threading
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import nn

from modelopt_lite.errors import OffloadError
from modelopt_lite.offload.config import ONE_SHOT_FIELDS, OffloadConfig
from modelopt_lite.offload.device import Device
from modelopt_lite.offload.ledger import BLOCKS
from modelopt_lite.offload.selection import Selection
from modelopt_lite.offload.tensors import TensorManager

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

    @property
    def blocks_mb(self) -> float:
        """Blocks in MiB."""
        return self.blocks_bytes / 2**20

    @property
    def unmapped_tensors_mb(self) -> float:
        """Weights that stay, in MiB."""
        return self.unmapped_tensors_bytes / 2**20

    @property
    def total_mb(self) -> float:
        """Both together, in MiB."""
        return self.total_bytes / 2**20


class ManagerState:
    """The part of `OffloadManager` that changes no model.

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
        self._passes = 0
        self._generation = -1

    def set_config(self, config: OffloadConfig) -> None:
        """Replace the config.

        Fields that take effect at `offload` alone are told of in a UserWarning where a model is
        offloaded already.

        Raises:
            OffloadError: A model is offloaded, and ``skip_discovery`` or a shm field would change.
        """
        if self.model is not None:
            changed = {
                name
                for name in type(config).model_fields
                if getattr(config, name) != getattr(self.config, name)
            }
            if fixed := sorted(changed & {"skip_discovery", "shm_enabled", "shm_namespace"}):
                raise OffloadError(
                    f"{fixed[0]} cannot change while a model is offloaded; release()"
                )
            if late := sorted(changed & ONE_SHOT_FIELDS):
                message = f"{', '.join(late)}: without effect until the next offload()"
                warnings.warn(message, UserWarning, stacklevel=2)
        self.config = config

    @property
    def device(self) -> Device:
        """Where units compute, and where inputs belong (``device.torch_device``).

        Raises:
            OffloadError: Nothing is offloaded, and no device was given when the manager was made.
        """
        device = self._device or self._given_device
        if device is None:
            raise OffloadError(f"manager {self.name!r} has no device yet; call offload() first")
        return device

    @property
    def iters_before_inference(self) -> int:
        """How many passes are left before INFERENCE."""
        if self.phase is Phase.INFERENCE:
            return 0
        profiling = max(1, self.config.profiling_iters)
        if self.phase is Phase.PROFILING:
            return profiling - self._passes
        return max(1, self.config.discovery_iters) - self._passes + profiling

    @property
    def eager_profiling_iters(self) -> int:
        """How many passes are timed before INFERENCE."""
        return max(1, self.config.profiling_iters)

    def _budget(self) -> int | None:
        fraction = self.config.max_gpu_mem_fraction
        assert self._device is not None
        return None if fraction is None else int(self._device.memory_info().total * fraction)

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
        blocks = ledger.held(BLOCKS).get("device", 0)
        return GPUMemoryUsage(blocks, ledger.total("device") - blocks)

    def get_tensor_manager(self) -> TensorManager | None:
        """Return what owns the tensors; None without a model."""
        return self._tensor_manager

    def _require(self, what: str) -> TensorManager:
        if self._tensor_manager is None:
            raise OffloadError(f"{what} needs a model: call offload(model, config) first")
        return self._tensor_manager

    @property
    def in_own_thread(self) -> bool:
        """Whether this is the thread that made the manager."""
        return threading.get_ident() == self._thread

    def check_thread(self) -> None:
        """Raise `OffloadError` in a thread other than the one that made this manager."""
        if not self.in_own_thread:
            raise OffloadError(
                f"manager {self.name!r} belongs to thread {self._thread}, and thread "
                f"{threading.get_ident()} used it; give each thread a manager of its own"
            )


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
