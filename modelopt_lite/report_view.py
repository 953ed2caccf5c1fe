"""Show a report and an audit on a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from modelopt_lite.report import Report
    from modelopt_lite.verify.findings import Finding

_WORST = 3
_LISTED = 4


def bytes_text(count: float) -> str:
    """Return a size with three digits and a unit of powers of 1000: ``8.31 MB``."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:,.3g} TB"


def facts_table(facts: Mapping[str, str]) -> Table:
    """Return a table of names and values without lines."""
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, value in facts.items():
        table.add_row(name, Text(value))
    return table


def report_table(report: Report) -> RenderableType:
    """Return what a user wants to know at the end of a run."""
    errors = sorted(report.relative_errors.items(), key=lambda item: -item[1])
    formats = ", ".join(sorted(set(report.quantized.values())))
    saved = report.export_bytes / report.source_bytes if report.source_bytes else 0.0
    facts = {
        "export": report.export_dir,
        "format": f"{formats} (recipe {report.recipe}), {len(report.quantized):,} matrices, "
        f"{len(report.excluded):,} left as they are",
        "size": f"{bytes_text(report.export_bytes)}, {saved:.0%} of "
        f"{bytes_text(report.source_bytes)}",
        "bits per weight": f"{report.bits_per_weight:.2f}",
        "seconds": _seconds(report.seconds),
        "peak memory": bytes_text(report.peak_memory_bytes),
        "relative error": _errors(errors),
        "cold experts": _listed(report.cold_experts),
    }
    if report.beyond_bound:
        facts["beyond bound"] = _listed(report.beyond_bound)
    facts = _reused(report) | facts
    lines = [*(f"fell back: {text}" for text in report.fallbacks), *report.notes]
    return Group(facts_table(facts), *(Text(f"note: {line}") for line in lines))


def _reused(report: Report) -> dict[str, str]:
    if not report.reused:
        return {}
    return {
        "reused": "nothing was done: the folder holds the finished export of the same inputs, and "
        "this is its report; --overwrite makes it again"
    }


def findings_table(folder: str, findings: Sequence[Finding]) -> RenderableType:
    """Return the findings of an audit, errors first, and a line that counts them."""
    errors = sum(finding.severity == "error" for finding in findings)
    if not findings:
        return Text(f"{folder}: no findings")
    table = Table("severity", "rule", "finding")
    for finding in sorted(findings, key=lambda finding: finding.severity):
        table.add_row(finding.severity, finding.rule, Text(finding.message))
    warnings = len(findings) - errors
    return Group(table, Text(f"{folder}: {errors} errors, {warnings} warnings"))


def _seconds(phases: Mapping[str, float]) -> str:
    parts = ", ".join(f"{name} {seconds:.1f}" for name, seconds in phases.items())
    return f"{sum(phases.values()):.1f} ({parts})" if parts else "0"


def _errors(worst_first: Sequence[tuple[str, float]]) -> str:
    if not worst_first:
        return "not measured"
    values = [value for _, value in worst_first]
    middle = values[len(values) // 2]
    worst = ", ".join(f"{name} {value:.4f}" for name, value in worst_first[:_WORST])
    return f"median {middle:.4f}; worst {worst}"


def _listed(names: Sequence[str]) -> str:
    if not names:
        return "none"
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return f"{len(names)}: {', '.join(names[:_LISTED])}{more}"
