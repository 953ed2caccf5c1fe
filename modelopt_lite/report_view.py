"""Show a report and an audit on a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from modelopt_lite.words import bytes_text, counted

if TYPE_CHECKING:
    from modelopt_lite.fidelity import Fidelity
    from modelopt_lite.formats.errors import ErrorReport
    from modelopt_lite.report import Report
    from modelopt_lite.verify.audit import Audit, Coverage
    from modelopt_lite.verify.diff import Difference
    from modelopt_lite.verify.findings import Finding

_WORST = 3
_LISTED = 4
_SHOWN = 3
_WORST_SHOWN = 10
_DIFFERING_SHOWN = 20


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


def audit_view(audit: Audit, source: str | None, *, deep: bool = False) -> RenderableType:
    """Return what an audit found: the worst matrices where they were compared, then findings."""
    from modelopt_lite.verify.audit import worst_first

    parts: list[RenderableType] = []
    if audit.errors:
        parts.append(weight_errors_table(worst_first(audit.errors)))
    if audit.findings:
        parts.append(findings_table(audit.findings))
    counts = f"{audit.folder}: {_counts(audit.findings)}"
    parts.append(Text(f"{counts}{_checked(audit.coverage, source, deep)}"))
    return Group(*parts)


def findings_table(findings: Sequence[Finding]) -> Table:
    """Return the findings of an audit, errors first; of each rule the first few are shown."""
    table = Table("severity", "rule", "engines", "finding")
    by_rule: dict[tuple[str, str, str], list[str]] = {}
    for finding in findings:
        key = (finding.severity, finding.rule, ", ".join(finding.engines or ()))
        by_rule.setdefault(key, []).append(finding.message)
    for (severity, rule, engines), messages in sorted(by_rule.items(), key=lambda i: i[0][0]):
        for message in messages[:_SHOWN]:
            table.add_row(severity, rule, engines, Text(message))
        if (more := len(messages) - _SHOWN) > 0:
            table.add_row(severity, rule, engines, Text(f"... and {more:,} more; --json lists all"))
    return table


def weight_errors_table(errors: Sequence[tuple[str, ErrorReport]]) -> Table:
    """Return the first few of the matrices that were compared with their source."""
    table = Table("tensor", "relative error", "SQNR", "cosine", box=None, pad_edge=False)
    for name, report in errors[:_WORST_SHOWN]:
        sqnr = f"{report.sqnr:.1f} dB"
        table.add_row(name, f"{report.relative:.4f}", sqnr, f"{report.cosine:.6f}")
    if (more := len(errors) - _WORST_SHOWN) > 0:
        table.add_row(f"... and {more:,} more with smaller errors; --json lists all", "", "", "")
    return table


def difference_view(difference: Difference) -> RenderableType:
    """Return how two exports differ; of long lists the first few."""
    parts: list[RenderableType] = []
    if difference.tensors:
        table = Table("tensor", "differs in", "A", "B", "elements that differ", box=None)
        for t in difference.tensors[:_DIFFERING_SHOWN]:
            count = "" if t.differing is None else f"{t.differing:,} of {t.elements:,}"
            table.add_row(t.name, t.kind, t.a or "-", t.b or "-", count)
        parts += [table, *_more(len(difference.tensors))]
    if difference.values:
        table = Table("value of", "largest difference", "relative", box=None)
        for v in difference.values[:_DIFFERING_SHOWN]:
            table.add_row(v.name, f"{v.largest:.4g}", f"{v.relative:.4g}")
        parts += [table, *_more(len(difference.values))]
    if difference.undecoded:
        parts.append(Text(f"values are not compared: {difference.undecoded}"))
    parts += [Text(f"{k}: {a!r} -> {b!r}") for k, (a, b) in difference.configs.items()]
    parts += [Text(f"{file}: {how}") for file, how in difference.files.items()]
    return Group(*parts)


def _more(count: int) -> list[Text]:
    more = count - _DIFFERING_SHOWN
    return [Text(f"... and {more:,} more; --json lists all")] if more > 0 else []


def predictions_view(predicted: Fidelity) -> RenderableType:
    """Return how an export predicts a text, and the layers that differ most from the source's."""
    facts = {
        "KL(source || export)": f"{predicted.kl:.5f} nats a token, at most {predicted.kl_max:.4f}",
        "same likeliest token": f"{predicted.top1:.2%} of {predicted.tokens:,}",
        "perplexity": f"{predicted.source_perplexity:.4f} -> {predicted.export_perplexity:.4f}",
    }
    table = Table("layer", "relative error of its outputs", box=None, pad_edge=False)
    worst = sorted(predicted.layers.items(), key=lambda item: -item[1])
    for name, error in worst[:_WORST_SHOWN]:
        table.add_row(name, f"{error:.4f}")
    return Group(facts_table(facts), table)


def _counts(findings: Sequence[Finding]) -> str:
    if not findings:
        return "no findings"
    errors = sum(finding.severity == "error" for finding in findings)
    return f"{counted(errors, 'error')}, {counted(len(findings) - errors, 'warning')}"


def _checked(checked: Coverage | None, source: str | None, deep: bool) -> str:
    if checked is None:
        return " (it cannot be opened)"
    compared = "; not compared with a source"
    if source:
        how = "all" if deep else "names, shapes and copies"
        compared = f", {how} compared with {source}"
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
