"""The audit: what every exported checkpoint must satisfy, checked on the written files alone.

Nothing that the exporter knew is used, except in `audit_or_raise`, which also holds the files
against the plan. The rules follow what vLLM, SGLang and TensorRT-LLM do with a checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from modelopt_lite.checkpoint.dequant import open_source
from modelopt_lite.checkpoint.reader import Checkpoint
from modelopt_lite.errors import AuditError, CheckpointError
from modelopt_lite.verify.compare import check_errors, compare_with_source
from modelopt_lite.verify.config import (
    QuantConfig,
    check_algo,
    check_excludes,
    check_kv_config,
    open_modules,
)
from modelopt_lite.verify.export import Export
from modelopt_lite.verify.files import open_export
from modelopt_lite.verify.findings import Finding, Severity, shorten
from modelopt_lite.verify.groups import check_experts, check_groups, check_kv
from modelopt_lite.verify.source import check_sidecars, check_source
from modelopt_lite.verify.tensors import check_layout, check_values

__all__ = ["Finding", "Severity", "audit", "audit_or_raise", "compare_with_source"]

_LISTED = 10


def audit(
    folder: Path,
    *,
    source: Path | None = None,
    deep: bool = False,
    compare_bytes: bool = True,
) -> list[Finding]:
    """Check an export in the modelopt dialect.

    Every tensor is scanned in pieces of a mebibyte; no matrix is ever whole in memory unless
    ``deep``.

    Args:
        folder: The export. Damage of any kind gives findings, not an exception.
        source: What it was made from; adds the rules that compare the two.
        deep: With ``source``: dequantize every matrix and compare it, one at a time.
        compare_bytes: With ``source``: compare the values of what is not quantized, not only
            names, shapes and dtypes.

    Returns:
        What is wrong, in the order of the rules; empty for a right export.

    Raises:
        CheckpointError: The source cannot be read.
    """
    folder = Path(folder)
    checkpoint, findings = open_export(folder)
    if checkpoint is None:
        return findings
    with checkpoint:
        export, config, more = open_modules(checkpoint)
        findings += more
        original = open_source(Path(source)) if source is not None else None
        try:
            findings += _check(export, config)
            if original is not None:
                findings += check_source(export, original, compare_bytes=compare_bytes)
                findings += check_sidecars(folder, original.path)
                if deep:
                    findings += check_errors(export, original)
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
            f"the export breaks the rules of the audit in {len(errors)} places and was not kept:\n"
            + "\n".join(lines)
        )


def _check(export: Export, config: QuantConfig | None) -> Iterator[Finding]:
    yield from check_values(export)
    if config is not None:
        yield from check_layout(export)
        yield from check_algo(export, config)
        yield from check_excludes(export, config)
        yield from check_kv_config(export, config)
    yield from check_groups(export)
    yield from check_experts(export)
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
