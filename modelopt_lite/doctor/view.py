"""The table of a check, for people, and the same as data."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from modelopt_lite.doctor.findings import Checked, Status
from modelopt_lite.words import counted

_WORDS: dict[Status, str] = {
    "ok": "ok",
    "wrong": "wrong",
    "absent": "absent here",
    "not_checkable": "not checkable here",
    "no_causal_lm": "no causal LM",
}


def check_table(checked: Sequence[Checked], release: str) -> Group:
    """Return a line for each type, and below it what is wrong and what to write."""
    table = Table("model_type", "status", "what", box=None, pad_edge=False)
    for one in checked:
        style = "red" if one.status == "wrong" else ""
        table.add_row(one.model_type, Text(_WORDS[one.status], style), Text(one.why))
        for finding in one.findings:
            table.add_row("", Text(finding.field, "red"), Text(finding.found))
            table.add_row("", "", Text(f"-> {finding.remedy}"))
        for note in one.unproven:
            table.add_row("", "not proven", Text(note))
    return Group(table, Text(summary(checked, release)))


def summary(checked: Sequence[Checked], release: str) -> str:
    """Return the counts in one line."""
    counts = Counter(one.status for one in checked)
    parts = [f"{counts[status]} {word}" for status, word in _WORDS.items() if counts[status]]
    seconds = sum(one.seconds for one in checked)
    return (
        f"{counted(len(checked), 'spec')} against transformers {release} in {seconds:.1f} s: "
        f"{', '.join(parts)}"
    )


def check_data(checked: Sequence[Checked], release: str) -> dict[str, Any]:
    """Return everything as JSON's types."""
    return {
        "transformers": release,
        "counts": dict(Counter(one.status for one in checked)),
        "specs": [dataclasses.asdict(one) for one in checked],
    }
