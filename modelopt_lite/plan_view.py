"""Show on a terminal what a run would do."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.box import SIMPLE
from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from modelopt_lite.report_view import facts_table
from modelopt_lite.words import bytes_text, counted


def plan_tables(plan: Mapping[str, Any]) -> RenderableType:
    """Return tables of what `dry_run` gave; names that differ in numbers share a row."""
    layers = [unit for unit in plan["units"] if unit["is_layer"]]
    largest = max((unit["bytes"] for unit in plan["units"]), default=0)
    count = sum("format" in linear for linear in plan["linears"].values())
    facts = {
        "checkpoint": f"{plan['checkpoint']} ({plan['model_type']})",
        "export": plan["export_dir"],
        "recipe": f"{plan['recipe']}, {plan['numerics']} numerics",
        "dialect": ", ".join(plan["dialects"]),
        **_search_facts(plan["search"]),
        "KV cache": f"{plan['kv_cache']}, {counted(plan['kv_cache_layers'], 'layer')}"
        if plan["kv_cache"]
        else "left as it is",
        "calibration": _calibration(plan),
        "quantized": f"{count:,} of {len(plan['linears']):,} linear layers and experts",
        "tensors": f"{plan['source_tensors']:,} read, {plan['outputs']:,} written",
        "read": bytes_text(plan["bytes_to_read"]),
        "write": f"{bytes_text(plan['bytes_to_write'])} in "
        f"{counted(len(plan['files_to_write']), 'file')}",
        **_prediction_facts(plan),
        "streamed as": f"{counted(len(plan['units']), 'unit')}, "
        f"{_kinds(layers)}, the largest {bytes_text(largest)}",
        **_schedule_facts(plan["schedule"], plan["predicted"]),
        **_offload_facts(plan["offload"]),
    }
    notes = [Text(f"note: {note}") for note in plan["notes"]]
    tables = [facts_table(facts), _linears_table(plan["linears"])]
    if plan["parallel"] is not None:
        tables.append(_ranks_table(plan["parallel"]))
    return Group(*tables, *notes)


def _search_facts(search: Mapping[str, Any] | None) -> dict[str, str]:
    """What choosing formats would take, where they are not chosen yet."""
    if search is None:
        return {}
    asked = (
        f"{search['method']}: {counted(search['groups'], 'group')}, formats "
        f"{', '.join(search['formats'])}, at most {search['effective_bits']:g} bits a weight"
    )
    if search["saved"]:
        return {"formats chosen by": f"{asked}; scores of {search['folder']}"}
    times = {1: "once", 2: "twice"}
    reads = ", ".join(f"{what} {times[count]}" for what, count in search["reads"].items())
    tiers = (("host", "host memory"), ("device", "device memory"), ("disk_scratch", "on disk"))
    return {
        "search of formats": asked,
        "reads for it": f"{reads}: {bytes_text(search['bytes_to_read'])}, before the run",
        "memory for it": ", ".join(
            f"{bytes_text(search[tier])} {title}" for tier, title in tiers if search[tier]
        ),
    }


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


def _schedule_facts(schedule: Mapping[str, Any], predicted: Mapping[str, Any]) -> dict[str, str]:
    """What budgets make of the schedule, where they make something of it."""
    facts = {}
    if schedule["waiting"] is not None:
        facts["waiting activations"] = f"on disk beyond {bytes_text(schedule['waiting'])}"
    if schedule["experts"] is not None:
        facts["experts"] = f"{schedule['experts']:,} of a layer at a time, {_reads(predicted)}"
    return facts


def _reads(predicted: Mapping[str, Any]) -> str:
    if predicted["expert_reads"] == 1:
        return "each read once"
    again = bytes_text(predicted["bytes_read_again"])
    return f"read {predicted['expert_reads']} times: {again} more"


def _offload_facts(offload: Mapping[str, Any] | None) -> dict[str, str]:
    """How the model would run for inference, offloaded."""
    if offload is None:
        return {}
    if "refused" in offload:
        return {"offloaded inference": offload["refused"]}
    units, groups = offload["units"], offload["expert_groups"]
    parts = [
        f"{counted(len(units), 'unit')} of {bytes_text(max(units.values(), default=0))} at most",
        f"{bytes_text(sum(offload['resident'].values()))} stay",
    ]
    if groups:
        most = max(len(group["experts"]) for group in groups)
        parts.append(f"{counted(len(groups), 'group')} of {counted(most, 'expert')} at most")
    if degrees := [degree for degree in offload["ep_bytes"] if int(degree) > 1]:
        parts.append(f"expert parallelism by {', '.join(map(str, degrees))}")
    return {"offloaded inference": "; ".join(parts)}


def _kinds(layers: Sequence[Mapping[str, Any]]) -> str:
    """What units are: modules, or, where no layer is one, tensors in the order on disk."""
    return f"{counted(len(layers), 'decoder layer')} among them" if layers else "runs of tensors"


def _calibration(plan: Mapping[str, Any]) -> str:
    if not plan["needs_calibration"]:
        return "needs no data"
    if (data := plan["calibration"]) is None:
        return "needs data"
    samples, tokens = counted(data["samples"], "sequence"), counted(data["tokens"], "token")
    return f"{samples}, {tokens} of {data['origin']}"


def _linears_table(linears: Mapping[str, Mapping[str, Any]]) -> Table:
    titles = ("count", "linear layers", "shape", "format or reason")
    table = Table(*titles, box=SIMPLE, pad_edge=False)
    table.columns[0].justify = "right"
    for index in (0, 2):
        table.columns[index].no_wrap = True
    for (name, shape, what), count in _collapsed(linears).items():
        table.add_row(f"{count:,}", DottedName(name), shape, Text(what))
    return table


def _ranks_table(parallel: Mapping[str, Any]) -> Table:
    ep, edp, layers = (parallel[key] for key in ("ep", "edp", "layers"))
    table = Table(
        *("rank", "experts of each layer", "host memory", "device memory", "reads"),
        box=SIMPLE,
        pad_edge=False,
        title=f"ep {ep} x edp {edp}, {counted(layers, 'layer')} with routed experts",
        title_justify="left",
    )
    for rank in parallel["ranks"]:
        experts = (f"{first}-{stop - 1} of {n}" for n, (first, stop) in rank["experts"].items())
        sizes = (rank["host"], rank["device"], rank["bytes_read"])
        table.add_row(str(rank["rank"]), ", ".join(experts) or "none", *map(bytes_text, sizes))
    return table


class DottedName:
    """A name that is broken between its parts alone, where it does not fit in a line."""

    def __init__(self, name: str) -> None:
        self._parts = [f"{part}." for part in name.split(".")]
        self._parts[-1] = self._parts[-1][:-1]

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        """Tell rich the least and the greatest width that make sense."""
        sizes = [len(part) for part in self._parts]
        return Measurement(max(sizes), sum(sizes))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        """Give rich the lines."""
        line = ""
        for part in self._parts:
            if line and len(line) + len(part) > options.max_width:
                yield Text(line)
                line = ""
            line += part
        yield Text(line)


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
