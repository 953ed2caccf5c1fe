"""Show a report and an audit on a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from modelopt_lite.words import counted

if TYPE_CHECKING:
    from modelopt_lite.report import Report
    from modelopt_lite.verify.audit import Coverage
    from modelopt_lite.verify.findings import Finding

_WORST = 3
_LISTED = 4
_SHOWN = 3


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
    table.add_column(style="bold", no_wrap=True)
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
        "format": f"{formats} (recipe {report.recipe}), "
        f"{counted(len(report.quantized), 'matrix', 'matrices')}; left alone: "
        f"{len(report.excluded):,}",
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
    if report.cold_experts:
        lines.append(
            f"{counted(len(report.cold_experts), 'cold expert')}: no calibration token came there, "
            "so the largest input of the peers was taken; give more data (--calib-size, "
            "--calib-data), or --moe-calibrate-all-experts"
        )
    return Group(facts_table(facts), *(Text(f"note: {line}") for line in lines))


def _reused(report: Report) -> dict[str, str]:
    if not report.reused:
        return {}
    return {
        "reused": "nothing was done: the folder holds the finished export of the same inputs, and "
        "this is its report; --overwrite makes it again"
    }


def findings_table(
    folder: str, findings: Sequence[Finding], checked: Coverage | None, source: str | None
) -> RenderableType:
    """Return the findings of an audit, and a line that counts them and what was checked.

    Errors come first; of each rule the first few are shown.
    """
    summary = Text(f"{folder}: {_counts(findings)}{_checked(checked, source)}")
    if not findings:
        return summary
    table = Table("severity", "rule", "finding")
    by_rule: dict[tuple[str, str], list[str]] = {}
    for finding in findings:
        by_rule.setdefault((finding.severity, finding.rule), []).append(finding.message)
    for (severity, rule), messages in sorted(by_rule.items(), key=lambda item: item[0][0]):
        for message in messages[:_SHOWN]:
            table.add_row(severity, rule, Text(message))
        if (more := len(messages) - _SHOWN) > 0:
            table.add_row(severity, rule, Text(f"... and {more:,} more; --json lists all"))
    return Group(table, summary)


def _counts(findings: Sequence[Finding]) -> str:
    if not findings:
        return "no findings"
    errors = sum(finding.severity == "error" for finding in findings)
    return f"{counted(errors, 'error')}, {counted(len(findings) - errors, 'warning')}"


def _checked(checked: Coverage | None, source: str | None) -> str:
    if checked is None:
        return " (it cannot be opened)"
    compared = f", all compared with {source}" if source else "; not compared with a source"
    return (
        f" in {counted(checked.tensors, 'tensor')} of {counted(checked.files, 'file')}, "
        f"{counted(checked.quantized, 'quantized weight')} among them{compared}"
    )


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
