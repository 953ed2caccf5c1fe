"""How much memory this process may use: the machine's, or the limit of its control group."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path


def host_memory(root: Path = Path("/")) -> tuple[int, int]:
    """Return (free, total) bytes of host memory for this process.

    The least over the machine and every cgroup (v2) that the process is in; pages that the kernel
    can drop count as free. Where the system does not tell, free is total.

    Args:
        root: Where ``proc`` and ``sys`` are.
    """
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    free = _fields(root / "proc/meminfo").get("MemAvailable", total // 1024) * 1024
    for group in _groups(root):
        limit = _number(group / "memory.max")
        if limit is None:
            continue
        used = _number(group / "memory.current") or 0
        droppable = _fields(group / "memory.stat").get("inactive_file", 0)
        total = min(total, limit)
        free = min(free, limit - max(used - droppable, 0))
    return max(min(free, total), 0), total


def _groups(root: Path) -> Iterator[Path]:
    """Yield the folders of the process's cgroup and of those above it."""
    top = root / "sys/fs/cgroup"
    with suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            if line.startswith("0::"):
                group = top / line[3:].strip("/")
                yield group
                while group != top:
                    group = group.parent
                    yield group


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
