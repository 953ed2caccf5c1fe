"""Show on a terminal what a run would do."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from rich.box import SIMPLE
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from modelopt_lite.report_view import bytes_text, facts_table


def plan_tables(plan: Mapping[str, Any]) -> RenderableType:
    """Return tables of what `dry_run` gave; names that differ in numbers share a row."""
    layers = [unit for unit in plan["units"] if unit["is_layer"]]
    largest = max((unit["bytes"] for unit in plan["units"]), default=0)
    count = sum("format" in linear for linear in plan["linears"].values())
    facts = {
        "checkpoint": f"{plan['checkpoint']} ({plan['model_type']})",
        "export": plan["export_dir"],
        "recipe": f"{plan['recipe']}, {plan['numerics']} numerics",
        "KV cache": f"{plan['kv_cache']}, {plan['kv_cache_layers']} layers"
        if plan["kv_cache"]
        else "left as it is",
        "calibration": _calibration(plan),
        "quantized": f"{count:,} of {len(plan['linears']):,} linear layers and experts",
        "tensors": f"{plan['source_tensors']:,} read, {plan['outputs']:,} written",
        "read": bytes_text(plan["bytes_to_read"]),
        "write": f"{bytes_text(plan['bytes_to_write'])} in {len(plan['files_to_write'])} files",
        "memory": f"about {bytes_text(plan['memory_estimate'])} beyond the process, "
        f"on {plan['device']}",
        "streamed as": f"{len(plan['units'])} units, {len(layers)} of them decoder layers, the "
        f"largest {bytes_text(largest)}",
    }
    notes = [Text(f"note: {note}") for note in plan["notes"]]
    return Group(facts_table(facts), _linears_table(plan["linears"]), *notes)


def _calibration(plan: Mapping[str, Any]) -> str:
    if not plan["needs_calibration"]:
        return "needs no data"
    if (data := plan["calibration"]) is None:
        return "needs data"
    return f"{data['samples']:,} sequences, {data['tokens']:,} tokens of {data['origin']}"


def _linears_table(linears: Mapping[str, Mapping[str, Any]]) -> Table:
    titles = ("count", "linear layers", "shape", "format, or why not")
    table = Table(*titles, box=SIMPLE, pad_edge=False)
    table.columns[0].justify = "right"
    for column in table.columns[1:]:
        column.overflow = "fold"
    for (name, shape, what), count in _collapsed(linears).items():
        table.add_row(f"{count:,}", name, shape, Text(what))
    return table


def _collapsed(linears: Mapping[str, Mapping[str, Any]]) -> dict[tuple[str, str, str], int]:
    """Count linears by name with ``*`` for each number, shape, and format or reason."""
    rows: dict[tuple[str, str, str], int] = {}
    for name, linear in linears.items():
        shape = " x ".join(str(size) for size in linear.get("shape", ()))
        what = linear.get("format") or _without_numbers(linear["excluded"])
        key = (_without_numbers(name), shape, what)
        rows[key] = rows.get(key, 0) + 1
    return rows


def _without_numbers(name: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)
