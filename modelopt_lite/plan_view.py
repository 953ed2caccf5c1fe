"""Show a plan before it is run: as JSON for programs, as tables for people."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.box import SIMPLE
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from modelopt_lite.budgets import Budgets, unit_budget
from modelopt_lite.checkpoint.names import natural_key
from modelopt_lite.errors import RecipeError
from modelopt_lite.job import Job
from modelopt_lite.predict import BANDWIDTH, Batch, predict
from modelopt_lite.report_view import bytes_text, facts_table

MAX_SHARD_SIZE = 10**10


def describe_plan(
    job: Job,
    *,
    batches: Sequence[Batch] = (),
    budgets: Budgets | None = None,
    max_shard_size: int = MAX_SHARD_SIZE,
    read_bandwidth: int = BANDWIDTH,
    write_bandwidth: int = BANDWIDTH,
) -> dict[str, Any]:
    """Say what a run of ``job`` would do; no weight is read.

    Args:
        job: A prepared run.
        batches: What it would calibrate with, where it needs data.
        budgets: What it may take.
        max_shard_size: Largest weight file, in bytes.
        read_bandwidth: Of the source's disk, in bytes a second.
        write_bandwidth: Of the export's disk, in bytes a second.

    Returns:
        JSON values. ``linears`` has each linear layer and expert once: with ``format`` and
        ``shape``, or with ``excluded``, the reason. Sizes are in bytes.
    """
    plan, layout = job.plan, job.layout(max_shard_size)
    linears: dict[str, dict[str, Any]] = {
        m.name: {"format": m.format, "shape": list(m.shape), "input_group": m.input_group}
        for m in plan.matrices
    }
    linears |= {name: {"excluded": reason} for name, reason in plan.excluded.items()}
    needs_data = plan.needs_calibration
    budgets = budgets or Budgets()
    prediction = predict(job, layout, batches if needs_data else ())
    problems: list[str] = []
    try:
        _, prediction = unit_budget(job, budgets, prediction, stream=True)
    except RecipeError as error:
        problems.append(str(error))
    return {
        "checkpoint": str(job.folder),
        "model_type": job.model_type,
        "has_spec": plan.spec is not None,
        "recipe": plan.recipe.name,
        "format": plan.format.name,
        "numerics": plan.numerics,
        "kv_cache": plan.recipe.kv_cache,
        "kv_cache_layers": len(plan.kv_cache),
        "needs_calibration": needs_data,
        "linears": dict(sorted(linears.items(), key=lambda item: natural_key(item[0]))),
        "source_tensors": len(job.source.tensors),
        "outputs": sum(len(file.tensors) for file in layout.files),
        "bytes_to_read": prediction.bytes_read,
        "bytes_to_write": prediction.bytes_written,
        "files_to_write": [file.name for file in layout.files],
        "predicted": prediction.to_json(read_bandwidth, write_bandwidth),
        "budgets": asdict(budgets),
        "device": str(job.device),
        "units": _units(job),
        "notes": [*plan.fallbacks, *plan.notes],
        "problems": problems,
    }


def _units(job: Job) -> list[dict[str, Any]]:
    sizes = {
        name: tensor.numel() * tensor.element_size()
        for name, tensor in job.model.state_dict(keep_vars=True).items()
    }
    return [
        {"name": unit.name, "is_layer": unit.is_layer, "bytes": sum(sizes[e] for e in unit.entries)}
        for unit in job.plan.units
    ]


def plan_tables(plan: Mapping[str, Any]) -> RenderableType:
    """Return tables of what `describe_plan` gave; names that differ in numbers share a row."""
    layers = [unit for unit in plan["units"] if unit["is_layer"]]
    largest = max((unit["bytes"] for unit in plan["units"]), default=0)
    count = sum("format" in linear for linear in plan["linears"].values())
    facts = {
        "checkpoint": f"{plan['checkpoint']} ({plan['model_type']})",
        "recipe": f"{plan['recipe']}, {plan['numerics']} numerics",
        "KV cache": f"{plan['kv_cache']}, {plan['kv_cache_layers']} layers"
        if plan["kv_cache"]
        else "left as it is",
        "calibration": "needs data" if plan["needs_calibration"] else "needs no data",
        "quantized": f"{count:,} of {len(plan['linears']):,} linear layers and experts",
        "tensors": f"{plan['source_tensors']:,} read, {plan['outputs']:,} written",
        "read": bytes_text(plan["bytes_to_read"]),
        "write": f"{bytes_text(plan['bytes_to_write'])} in {len(plan['files_to_write'])} files",
        **_prediction_facts(plan),
        "streamed as": f"{len(plan['units'])} units, {len(layers)} of them decoder layers, the "
        f"largest {bytes_text(largest)}",
    }
    notes = [Text(f"note: {note}") for note in plan["notes"]]
    return Group(facts_table(facts), _linears_table(plan["linears"]), *notes)


def _prediction_facts(plan: Mapping[str, Any]) -> dict[str, str]:
    """Peaks by tier, each with its largest parts, and how long the disk is busy."""
    predicted, budgets = plan["predicted"], plan["budgets"]
    facts = {}
    for tier, title in (("host", "host memory"), ("device", f"memory of {plan['device']}")):
        if predicted[tier]:
            parts = sorted(predicted[f"{tier}_parts"].items(), key=lambda part: -part[1])
            largest = ", ".join(f"{name} {bytes_text(size)}" for name, size in parts[:3])
            allowed = f" of {bytes_text(budgets[tier])}" if budgets[tier] else ""
            facts[title] = f"{bytes_text(predicted[tier])}{allowed} at the peak: {largest}, …"
    facts["temporary files"] = bytes_text(predicted["disk_scratch"])
    seconds = [predicted[f"seconds_{what}"] for what in ("reading", "writing")]
    facts["disk time"] = (
        f"{seconds[0]:,.0f} s reading at {bytes_text(predicted['read_bandwidth'])}/s, "
        f"{seconds[1]:,.0f} s writing at {bytes_text(predicted['write_bandwidth'])}/s, "
        "behind the computation"
    )
    return facts


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
