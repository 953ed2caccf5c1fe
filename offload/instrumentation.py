"""Instrumentation (``enable_instrumentation``): how each part was configured, written to disk."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from modelopt_lite import __version__
from modelopt_lite.offload.diagnostics import unit_rows
from modelopt_lite.offload.hostmemory import host_memory

if TYPE_CHECKING:
    from modelopt_lite.offload.managerplan import PlanningManager

log = logging.getLogger("modelopt_lite.offload")


class Components:
    """The parts of a manager, and what each was made with."""

    def __init__(self) -> None:
        self._noted: list[dict[str, Any]] = []

    def note(self, made: object, **args: object) -> None:
        """Note a part.

        Args:
            made: The part; its class is told, and its fields where it is a dataclass.
            args: What it was made with.
        """
        if dataclasses.is_dataclass(made) and not args:
            args = {field.name: getattr(made, field.name) for field in dataclasses.fields(made)}
        self._noted.append(
            {
                "class_name": type(made).__name__,
                "module_path": type(made).__module__,
                "init_timestamp": datetime.now().astimezone().isoformat(),
                "args": {name: _plain(value) for name, value in args.items()},
            }
        )

    def write(self, manager: PlanningManager, folder: Path | str) -> Path | None:
        """Write all parts, host memory, and the times of labels and copies.

        The file is ``<folder>/<date>_<time>/components.<date>_<time>_pid<pid>.json``. Where it
        cannot be written, a warning tells why: a run is not worth losing for it.

        Returns:
            The file, or None.
        """
        now = datetime.now().astimezone()
        stamp = f"{now:%Y%m%d_%H%M%S}"
        path = Path(folder) / stamp / f"components.{now:%Y%m%d_%H%M%S_%f}_pid{os.getpid()}.json"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(self._content(manager, now), indent=1), encoding="utf-8")
        except OSError as error:
            log.warning("manager %s: instrumentation is not written: %s", manager.name, error)
            return None
        return path

    def _content(self, manager: PlanningManager, now: datetime) -> dict[str, Any]:
        tensors = manager.get_tensor_manager()
        assert tensors is not None
        return {
            "timestamp": now.isoformat(),
            "modelopt_lite_version": __version__,
            "manager": manager.name,
            "phase": manager.phase.value,
            "components": self._noted,
            "host_memory": _host_memory(),
            "memory_transfer_stats": tensors.transfer_curve(),
            "labels": [dataclasses.asdict(row) for row in unit_rows(manager)],
        }


def _host_memory() -> dict[str, int]:
    """Bytes of host memory for this process, and of swap on this machine."""
    free, total = host_memory()
    swap_total = swap_used = 0
    with suppress(OSError, ValueError):
        for line in Path("/proc/swaps").read_text().splitlines()[1:]:
            *_, size, used, _priority = line.split()
            swap_total += int(size) * 1024
            swap_used += int(used) * 1024
    return {
        "host_memory_free": free,
        "host_memory_total": total,
        "swap_total": swap_total,
        "swap_used": swap_used,
    }


def _plain(value: object) -> Any:
    """Return what JSON can hold of a value; of others their text."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(inner) for inner in value]
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    return repr(value)
