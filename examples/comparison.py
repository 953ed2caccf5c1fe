"""What the examples share: run a step in a process of its own, and show a table of results."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from modelopt_lite.report import REPORT_FILE, Report
from modelopt_lite.report_view import bytes_text


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table; the order of the fields is that of its columns."""

    format: str
    size: str
    bits_per_weight: str
    perplexity_before: str
    perplexity_after: str
    seconds: str
    peak_memory: str

    @classmethod
    def of(cls, report: Report, before: Mapping[str, Any], after: Mapping[str, Any]) -> Row:
        """Return the row of one export."""
        return cls(
            report.recipe,
            bytes_text(report.export_bytes),
            f"{report.bits_per_weight:.2f}",
            f"{before['perplexity']:.4f}",
            f"{after['perplexity']:.4f}",
            f"{sum(report.seconds.values()):.1f}",
            bytes_text(report.peak_memory_bytes),
        )


def quantize(source: Path, export: Path, recipe: str, *options: str) -> Report:
    """Quantize with the command line, which audits the export, and return its report."""
    _run("quantize", str(source), "--recipe", recipe, "--export-dir", str(export), *options)
    data = json.loads((export / REPORT_FILE).read_text(encoding="utf-8"))
    data.pop("bits_per_weight")
    return Report(**data)


def audit(export: Path, source: Path) -> str:
    """Audit an export, each matrix against its source; return what the audit says."""
    return _run("verify", str(export), "--source", str(source), "--deep").splitlines()[-1]


def measure(checkpoint: Path, *, max_tokens: int, seq_len: int) -> dict[str, Any]:
    """Return the evaluation of a checkpoint on the evaluation share of the default text."""
    sizes = ("--max-tokens", str(max_tokens), "--seq-len", str(seq_len))
    result: dict[str, Any] = json.loads(_run("eval", str(checkpoint), "--json", *sizes))
    return result


def _run(*arguments: str) -> str:
    command = [sys.executable, "-m", "modelopt_lite", *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        print(done.stdout)
        sys.exit(done.returncode)  # the command has said why
    return done.stdout


def print_rows(rows: Sequence[Row], title: str, console: Console) -> None:
    """Print the table."""
    table = Table(*("\n".join(t.rsplit(" ", 1)) for t in _titles()), title=title, box=SIMPLE)
    for row in rows:
        table.add_row(*asdict(row).values())
    console.print(table)


def write_rows(rows: Sequence[Row], path: Path) -> None:
    """Write the table as markdown."""
    lines = [_titles(), ["---"] * len(_titles()), *(list(asdict(row).values()) for row in rows)]
    path.write_text("".join(f"| {' | '.join(line)} |\n" for line in lines), encoding="utf-8")


def _titles() -> list[str]:
    return [name.replace("_", " ") for name in Row.__dataclass_fields__]
