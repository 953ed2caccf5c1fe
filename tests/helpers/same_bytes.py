"""Compare what several ranks write with what one process writes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ranks import quantize, run_ranks

from modelopt_lite import report as reports
from modelopt_lite.report import REPORT_FILE

# What differs from run to run, or says who did what.
OF_THE_RUN = (
    *("export_dir", "seconds", "peak_memory_bytes", "predicted_memory_bytes"),
    *("bytes_read", "ranks", "timeline", "command", "budgets"),
)


def files(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name not in reports.OF_THE_RUN
    }


def report(folder: Path) -> dict[str, Any]:
    data: dict[str, Any] = json.loads((folder / REPORT_FILE).read_text())
    return {key: value for key, value in data.items() if key not in OF_THE_RUN}


def compare(
    source: Path, out: Path, sizes: Sequence[tuple[int, int | None]], batches: Any, **options: Any
) -> list[Any]:
    """Quantize in one process, and on ranks of each (world size, ep); return the last reports."""
    quantize(source, out / "alone", batches, options)
    reports: list[Any] = []
    for size, ep in sizes:
        folder = out / f"{size}-{ep}"
        reports = run_ranks(size, source, folder, batches, ep=ep, **options)
        assert files(folder) == files(out / "alone"), (size, ep)
        assert report(folder) == report(out / "alone"), (size, ep)
        assert not list(out.glob(".*")), "half-written folders"
    return reports
