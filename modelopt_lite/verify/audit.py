"""The audit: what every exported checkpoint must satisfy, checked on the written files alone.

Nothing that the exporter knew is used, except in `audit_or_raise`, which also holds the files
against the plan. The rules follow what vLLM, SGLang and TensorRT-LLM do with a checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from modelopt_lite.checkpoint.dequant import open_source
from modelopt_lite.checkpoint.reader import Checkpoint
from modelopt_lite.errors import AuditError, CheckpointError
from modelopt_lite.formats.errors import ErrorReport
from modelopt_lite.jsons import finite
from modelopt_lite.verify.cache import check_kv
from modelopt_lite.verify.compare import check_errors, compare_with_source
from modelopt_lite.verify.engines import check_engines
from modelopt_lite.verify.export import Export
from modelopt_lite.verify.files import open_export
from modelopt_lite.verify.findings import Finding, Severity, shorten
from modelopt_lite.verify.groups import check_experts, check_groups, check_head
from modelopt_lite.verify.opening import Opened, open_modules
from modelopt_lite.verify.rules import narrowed, with_engines
from modelopt_lite.verify.source import check_sidecars, check_source
from modelopt_lite.verify.tensors import (
    check_global_scales,
    check_layout,
    check_leftovers,
    check_values,
)
from modelopt_lite.words import counted

__all__ = ["Finding", "Severity", "audit", "audit_or_raise", "compare_with_source", "examine"]

_LISTED = 10


@dataclass(frozen=True, slots=True)
class Coverage:
    """How much there is to check in an export: files and tensors, and which of them are packed."""

    files: int
    tensors: int
    quantized: int


@dataclass(frozen=True, slots=True)
class Audit:
    """What was found in one export.

    Attributes:
        folder: The export.
        dialect: How it is written; None where it cannot be opened.
        coverage: What was looked at; None where it cannot be opened.
        findings: What is wrong.
        errors: Of each quantized matrix that was compared with its source.
    """

    folder: Path
    dialect: str | None
    coverage: Coverage | None
    findings: list[Finding]
    errors: dict[str, ErrorReport]

    @property
    def failed(self) -> bool:
        """Whether an error is among the findings."""
        return any(finding.severity == "error" for finding in self.findings)

    def as_dict(self) -> dict[str, Any]:
        """Return it as JSON holds it, the worst of ``errors`` first."""
        return {
            "folder": str(self.folder),
            "dialect": self.dialect,
            "checked": asdict(self.coverage) if self.coverage else None,
            "findings": [_finding(finding) for finding in self.findings],
            "errors": [
                finite({"tensor": name, **_numbers(report)})
                for name, report in worst_first(self.errors)
            ],
        }


def worst_first(errors: Mapping[str, ErrorReport]) -> list[tuple[str, ErrorReport]]:
    """Return reports from the largest relative error to the smallest; NaN is the largest."""

    def key(item: tuple[str, ErrorReport]) -> tuple[bool, float]:
        return not math.isnan(item[1].relative), -item[1].relative

    return sorted(errors.items(), key=key)


def _finding(finding: Finding) -> dict[str, Any]:
    shown = asdict(finding)
    shown.pop("decisive")
    return {**shown, "engines": list(finding.engines or ())}


def _numbers(report: ErrorReport) -> dict[str, float]:
    """The measures of a matrix."""
    return {
        "relative": report.relative,
        "sqnr_db": report.sqnr,
        "cosine": report.cosine,
        "share_of_bound": report.worst,
    }


def audit(
    folder: Path,
    *,
    source: Path | None = None,
    deep: bool = False,
    compare_bytes: bool = True,
    engines: tuple[str, ...] = (),
) -> list[Finding]:
    """Return the findings of `examine`: what is wrong with an export."""
    seen = examine(folder, source=source, deep=deep, compare_bytes=compare_bytes, engines=engines)
    return seen.findings


def examine(
    folder: Path,
    *,
    source: Path | None = None,
    deep: bool = False,
    compare_bytes: bool = True,
    engines: tuple[str, ...] = (),
) -> Audit:
    """Check an export in the dialect that its config names.

    Every tensor is scanned in pieces of a mebibyte; no matrix is ever whole in memory unless
    ``deep``.

    Args:
        folder: The export. Damage of any kind gives findings, not an exception.
        source: What it was made from; adds the rules that compare the two.
        deep: With ``source``: dequantize every matrix and compare it, one at a time.
        compare_bytes: With ``source``: compare the values of what is not quantized, not only
            names, shapes and dtypes.
        engines: Keys of `modelopt_lite.verify.rules.ENGINES`: keep what these refuse or load
            wrongly. None: what any does.

    Returns:
        What was found, in the order of the rules; no findings for a right export.

    Raises:
        CheckpointError: The source cannot be read.
    """
    folder = Path(folder)
    checkpoint, findings = open_export(folder)
    if checkpoint is None:
        return Audit(folder, None, None, _located(findings, None, engines), {})
    errors: dict[str, ErrorReport] = {}
    with checkpoint:
        opened = open_modules(checkpoint)
        findings += opened.findings
        if opened.check is not None:
            findings += check_engines(opened.export, engines)
        findings += _of_contents(opened, source, deep, compare_bytes, errors)
        dialect = opened.export.dialect.name
        located = _located(findings, dialect, engines)
        return Audit(folder, dialect, _coverage(opened.export), located, errors)


def _located(
    findings: list[Finding], dialect: str | None, engines: tuple[str, ...]
) -> list[Finding]:
    located = [with_engines(finding, dialect) for finding in findings]
    return narrowed(located, engines) if engines else located


def _coverage(export: Export) -> Coverage:
    files = {info.file for info in export.tensors.values()}
    return Coverage(len(files), len(export.tensors), sum(1 for _ in export.packed()))


def _of_contents(
    opened: Opened,
    source: Path | None,
    deep: bool,
    compare_bytes: bool,
    errors: dict[str, ErrorReport],
) -> list[Finding]:
    export = opened.export
    original = open_source(Path(source)) if source is not None else None
    findings: list[Finding] = []
    try:
        findings += _check(opened)
        if original is not None:
            findings += check_source(export, original, compare_bytes=compare_bytes)
            findings += check_sidecars(export.folder, original.path)
            if deep:
                findings += check_errors(export, original, errors)
    except CheckpointError as error:  # a file that changes or fails while it is read
        findings.append(Finding("checkpoint-readable", str(error)))
    finally:
        if original is not None:
            original.close()
    return findings


def audit_or_raise(folder: Path, *, source: Path, plan: Any) -> None:
    """Audit an export that was just written, and hold it against the plan of its run.

    Values of copied tensors are not compared with the source again; the run did so.

    Args:
        folder: The export.
        source: What it was made from.
        plan: The run's `modelopt_lite.plan.Plan`.

    Raises:
        AuditError: With the first errors; warnings do not count.
    """
    findings = audit(folder, source=source, compare_bytes=False)
    findings += _check_plan(Path(folder), Path(source), plan)
    errors = [finding for finding in findings if finding.severity == "error"]
    if errors:
        lines = [f"[{finding.rule}] {finding.message}" for finding in errors[:_LISTED]]
        if len(errors) > _LISTED:
            lines.append(f"and {len(errors) - _LISTED} more")
        raise AuditError(
            f"the export breaks the rules of the audit in {counted(len(errors), 'place')} and was "
            "not kept:\n" + "\n".join(lines)
        )


def _check(opened: Opened) -> Iterator[Finding]:
    export = opened.export
    yield from check_values(export)
    if opened.check is not None:
        yield from check_layout(export)
        yield from opened.check(export)
    yield from check_groups(export)
    yield from check_experts(export)
    yield from check_head(export)
    yield from check_leftovers(export)
    yield from check_global_scales(export)
    yield from check_kv(export)


def _check_plan(folder: Path, source: Path, plan: Any) -> Iterator[Finding]:
    """Rules: ``plan-outputs``, ``plan-accounting``."""
    try:
        with Checkpoint(folder) as checkpoint:
            tensors = checkpoint.tensors
    except CheckpointError:
        return  # already a finding
    planned = {output.name: (output.dtype, tuple(output.shape)) for output in plan.outputs}
    written = {name: (info.dtype, info.shape) for name, info in tensors.items()}
    for what, names in (
        ("lacks", sorted(planned.keys() - written.keys())),
        ("has, beyond the plan,", sorted(written.keys() - planned.keys())),
        (
            "has another dtype or shape than planned for",
            sorted(n for n in planned.keys() & written.keys() if planned[n] != written[n]),
        ),
    ):
        if names:
            yield Finding("plan-outputs", f"{folder}: {what} {shorten(names)}; report this fault")
    accounted = {entry.source for entry in (*plan.copies, *plan.matrices)}
    with open_source(source) as original:
        lost = [name for name in original.tensors if name not in accounted]
    if lost:
        yield Finding(
            "plan-accounting",
            f"{source}: {shorten(lost)} is neither quantized nor copied; report this fault",
        )
