"""How much memory this process may use: the machine's, or the limit of its control group."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class _Version:
    """Where a version of cgroups keeps its figures, and what it calls them.

    Without a limit, version 2 says "max" and version 1 a number beyond any machine.
    """

    folder: str
    limit: str
    used: str
    droppable: str


_V1 = _Version("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_V2 = _Version("", "memory.max", "memory.current", "inactive_file")


def host_memory(root: Path = Path("/")) -> tuple[int, int]:
    """Return (free, total) bytes of host memory for this process.

    The least over the machine and every cgroup, of version 1 or 2, that the process is in; pages
    that the kernel can drop count as free. Where the system does not tell, free is total.

    Args:
        root: Where ``proc`` and ``sys`` are.
    """
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    free = _fields(root / "proc/meminfo").get("MemAvailable", total // 1024) * 1024
    for group, version in _groups(root):
        limit = _number(group / version.limit)
        if limit is None:
            continue
        used = _number(group / version.used) or 0
        droppable = _fields(group / "memory.stat").get(version.droppable, 0)
        total = min(total, limit)
        free = min(free, limit - max(used - droppable, 0))
    return max(min(free, total), 0), total


def _groups(root: Path) -> Iterator[tuple[Path, _Version]]:
    """Yield the folders of the process's cgroups and of those above them.

    In a container, a group's name may be that outside, where there is no such folder; the top is
    then the container's own.
    """
    with suppress(OSError, ValueError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            number, controllers, name = line.split(":", 2)
            if number == "0":
                version = _V2
            elif "memory" in controllers.split(","):
                version = _V1
            else:
                continue
            top = root / "sys/fs/cgroup" / version.folder
            group = top / name.strip("/")
            yield group, version
            while group != top:
                group = group.parent
                yield group, version


def _number(path: Path) -> int | None:
    with suppress(OSError, ValueError):
        return int(path.read_text())
    return None  # no such file, or "max"


def _fields(path: Path) -> dict[str, int]:
    """Read lines of the form ``name value`` or ``name: value kB``."""
    with suppress(OSError, ValueError):
        rows = [line.replace(":", " ").split() for line in path.read_text().splitlines()]
        return {row[0]: int(row[1]) for row in rows if len(row) > 1}
    return {}
