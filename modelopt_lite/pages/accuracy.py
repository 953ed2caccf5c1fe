"""Show what was measured of an export's accuracy, and kept in its report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

# Key of a measurement -> head of its column, and how the value is written.
_COLUMNS = {
    "perplexity": ("perplexity", ".4f"),
    "source_perplexity": ("of the source", ".4f"),
    "change": ("change", "+.2%"),
    "kl": ("KL, nats a token", ".5f"),
    "top1": ("same likeliest token", ".2%"),
    "value": ("value", ".4f"),
    "stderr": ("standard error", ".4f"),
    "tokens": ("tokens", ",d"),
}


def accuracy_rows(
    accuracy: Sequence[Mapping[str, Any]],
) -> tuple[list[str], list[list[str]]]:
    """Return the head of a table and its rows; the columns are those that some row has."""
    accuracy = [_with_change(row) for row in accuracy]
    keys = [key for key in _COLUMNS if any(row.get(key) is not None for row in accuracy)]
    head = ["measured on", *(_COLUMNS[key][0] for key in keys)]
    rows = [
        [
            " ".join(filter(None, (str(row.get("on", "")), _in(row)))),
            *(
                format(row[key], _COLUMNS[key][1]) if row.get(key) is not None else "-"
                for key in keys
            ),
        ]
        for row in accuracy
    ]
    return head, rows


def _with_change(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a row with what its perplexity is above that of the source, where both are known."""
    found, source = row.get("perplexity"), row.get("source_perplexity")
    return {**row, "change": found / source - 1} if found and source else row


def _in(row: Mapping[str, Any]) -> str:
    return f"({row['part']})" if row.get("part") else ""
