"""What the report's page and the model card both tell of a run."""

from __future__ import annotations

import statistics
from pathlib import Path

from modelopt_lite.formats.errors import decibels
from modelopt_lite.report import Report
from modelopt_lite.words import counted


def calibration_text(report: Report, *, places: bool) -> str:
    """Return what a model was calibrated with.

    Args:
        report: Of the run.
        places: Tell the folder of a file, too, and not its name alone.
    """
    found = report.details.get("calibration")
    if found is None:
        in_memory = report.details.get("options", {}).get("in_memory")
        return "by a loop of the author's" if in_memory else "none"
    origin = found["origin"] if places else Path(found["origin"]).name
    return f"{found['samples']:,} sequences, {found['tokens']:,} tokens of {origin}"


def errors_text(report: Report) -> str:
    """Return how far weights are from the source's, and whether their formats allow that."""
    errors = report.relative_errors
    if not errors:
        return "not measured: the run did not verify"
    worst = max(errors, key=errors.__getitem__)
    bound = "all within the bounds of their formats"
    if report.beyond_bound:
        bound = f"{counted(len(report.beyond_bound), 'matrix', 'matrices')} BEYOND the bound"
    return (
        f"median {relative_text(statistics.median(errors.values()))}, worst "
        f"{relative_text(errors[worst])} ({worst}); {bound}"
    )


def relative_text(error: float) -> str:
    """Return a relative error, and the same in decibels of signal over noise."""
    return f"{error:.4f} ({decibels(error):.1f} dB)" if error > 0 else f"{error:.4f}"


def experts_text(report: Report) -> str:
    """Return how many experts calibration reached; empty where there are none."""
    counts = [count for row in report.tokens_per_expert.values() for count in row]
    if not counts:
        return ""
    cold = sum(not count for count in counts)
    seen = f"{cold:,} COLD" if cold else "none cold"
    return f"{counted(len(counts), 'expert')}, {seen}; {min(counts):,} to {max(counts):,} tokens"
