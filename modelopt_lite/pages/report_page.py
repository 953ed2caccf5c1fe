"""``report.html``: what a run did, for a person; one file that needs nothing beside it."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable
from functools import partial
from html import escape
from pathlib import Path
from typing import Any

from modelopt_lite.pages import charts
from modelopt_lite.pages.accuracy import accuracy_rows
from modelopt_lite.pages.facts import (
    calibration_text,
    errors_text,
    experts_text,
    relative_text,
)
from modelopt_lite.pages.html import (
    bullets,
    code,
    facts,
    folded,
    page,
    paragraph,
    section,
    table,
)
from modelopt_lite.pages.layers import by_kind, by_reason, place_of
from modelopt_lite.report import PAGE_FILE, REPORT_FILE, Report, write_whole
from modelopt_lite.words import bytes_text, counted, printable

_KINDS = 8
_ROWS = 200
_WORST = 10


def write_page(report: Report, folder: Path) -> None:
    """Write the page of a report into a folder."""
    write_whole(folder / PAGE_FILE, report_page(report))


def report_page(report: Report) -> str:
    """Return the page of a report; with charts where matplotlib is installed."""
    pictures = _Pictures()
    parts = [
        f"<h1>{escape(_title(report))}</h1>",
        _summary(report),
        _warnings(report),
        _accuracy(report),
        _sizes(report, pictures),
        _errors(report, pictures),
        _experts(report, pictures),
        _ranges(report, pictures),
        _resources(report, pictures),
        _left_alone(report),
        _again(report),
        paragraph(pictures.note) if pictures.note else "",
    ]
    return printable(page(_title(report), [part for part in parts if part]))


class _Pictures:
    """Draws charts, as far as that is possible; a chart is never why a run fails.

    Attributes:
        note: Why there are none, if so.
    """

    def __init__(self) -> None:
        self.note = ""
        self._on = charts.available()
        if not self._on:
            self.note = "Charts need matplotlib: pip install 'modelopt-lite[report]'."

    def draw(self, name: str, paint: Callable[[Any], None], *, height: float = 3.4) -> str:
        if not self._on:
            return ""
        try:
            return f'<div class="chart" id="{name}">{charts.draw(name, paint, height=height)}</div>'
        except Exception as error:  # of a library that draws; the tables tell the same
            self.note = f"A chart could not be drawn: {type(error).__name__}: {error}"
            return ""


def _title(report: Report) -> str:
    return f"{Path(report.details.get('source', report.model_type)).name}, {report.recipe}"


def _summary(report: Report) -> str:
    formats = Counter(report.quantized.values())
    listed = ", ".join(f"{fmt}: {counted(n, 'matrix', 'matrices')}" for fmt, n in formats.items())
    share = f" ({report.export_bytes / report.source_bytes:.1%})" if report.source_bytes else ""
    details = report.details
    values = {
        "export": report.export_dir,
        "source": str(details.get("source", "")),
        "model type": report.model_type,
        "recipe": report.recipe,
        "dialect": ", ".join(report.dialects),
        "quantized": listed or "none",
        "left as they are": counted(len(report.excluded), "module"),
        "size": f"{bytes_text(report.source_bytes)} → {bytes_text(report.export_bytes)}{share}",
        "bits per weight": f"{report.bits_per_weight:.2f}",
        "errors of weights": errors_text(report),
        "calibration": calibration_text(report, places=True),
        "tokens per expert": experts_text(report),
        "key and value cache": str(details.get("recipe", {}).get("kv_cache") or "as it is"),
        "processes": f"{len(report.ranks)}; the same bytes come of one" if report.ranks else "",
        "numerics": str(details.get("numerics", "")),
        "versions": ", ".join(f"{n} {v}" for n, v in details.get("versions", {}).items()),
    }
    return section("Summary", facts({name: value for name, value in values.items() if value}))


def _warnings(report: Report) -> str:
    lines = list(report.fallbacks)
    if report.cold_experts:
        lines.append(
            f"{counted(len(report.cold_experts), 'expert')} saw no calibration token, and took the "
            "largest input of the peers"
        )
    if report.beyond_bound:
        lines.append(f"beyond the format's error bound: {', '.join(report.beyond_bound[:_WORST])}")
    return section("To know", bullets(lines, "warning"), bullets(dict.fromkeys(report.notes)))


def _accuracy(report: Report) -> str:
    head, rows = accuracy_rows(report.accuracy)
    numbers = range(1, len(head))
    return section("Accuracy", table(head, rows, numbers=numbers, most=_ROWS))


def _sizes(report: Report, pictures: _Pictures) -> str:
    layers = report.layer_bytes
    rows = [
        [name, *map(bytes_text, both), f"{both[1] / both[0]:.1%}" if both[0] else "-"]
        for name, both in layers.items()
    ]
    drawn = pictures.draw("sizes", partial(charts.sizes, layers=layers)) if layers else ""
    head = ["layer", "source", "export", "share"]
    listed = table(head, rows, numbers=(1, 2, 3), most=_ROWS)
    return section("Sizes", drawn, folded("By layer", listed, unfolded=not drawn))


def _errors(report: Report, pictures: _Pictures) -> str:
    errors = report.relative_errors
    if not errors:
        return section("Errors of weights", paragraph("Not measured: the run did not verify."))
    kinds = by_kind(errors, _KINDS)
    rows: dict[str, list[float]] = {}
    for name, error in errors.items():
        rows.setdefault(place_of(name).layer, []).append(error)
    per_layer = [
        [layer, str(len(values)), f"{statistics.median(values):.4f}", relative_text(max(values))]
        for layer, values in rows.items()
    ]
    worst = sorted(errors.items(), key=lambda item: -item[1])[:_WORST]
    paint = partial(charts.by_layer, series=kinds, label="relative error", log=False)
    drawn = pictures.draw("errors", paint) if any(place_of(n).stack for n in errors) else ""
    listed = table(
        ["layer", "matrices", "median", "worst"], per_layer, numbers=(1, 2, 3), most=_ROWS
    )
    return section(
        "Errors of weights",
        paragraph(
            "|dequantized - source| / |source| (Frobenius), and signal over noise in decibels; the "
            "chart has each layer's worst of each kind. Formats have errors of their own: a line "
            "that leaves the others tells more than their height."
        ),
        drawn,
        folded("By layer", listed, unfolded=not drawn),
        paragraph("The worst matrices:"),
        table(
            ["matrix", "format", "relative error"],
            [[name, report.quantized.get(name, ""), relative_text(e)] for name, e in worst],
            numbers=(2,),
            most=_WORST,
        ),
    )


def _experts(report: Report, pictures: _Pictures) -> str:
    tokens = report.tokens_per_expert
    if not tokens:
        return ""
    rows = [
        [
            name,
            str(len(counts)),
            f"{min(counts):,}",
            f"{statistics.median(counts):,.0f}",
            f"{max(counts):,}",
            f"{sum(not count for count in counts):,}",
        ]
        for name, counts in tokens.items()
    ]
    height = min(9.0, 2.0 + 0.22 * len(tokens))
    drawn = pictures.draw("experts", partial(charts.heat_map, tokens=tokens), height=height)
    head = ["experts of", "experts", "fewest", "median", "most", "cold"]
    listed = table(head, rows, numbers=(1, 2, 3, 4, 5), most=_ROWS)
    return section(
        "Tokens per expert",
        paragraph(
            "How many calibration tokens each expert saw; red: none, a cold expert, whose inputs "
            "are scaled as its peers' are."
        ),
        drawn,
        folded("By layer", listed, unfolded=not drawn),
        bullets(
            [f"cold: {', '.join(report.cold_experts[:_ROWS])}"] if report.cold_experts else [],
            "cold",
        ),
    )


def _ranges(report: Report, pictures: _Pictures) -> str:
    amax = report.input_amax
    kinds = by_kind(amax, _KINDS)
    rows = [
        [kind, str(len(values)), *(f"{f(values.values()):.4g}" for f in (min, max))]
        for kind, values in kinds.items()
    ]
    paint = partial(charts.by_layer, series=kinds, label="largest magnitude", log=True)
    drawn = pictures.draw("ranges", paint) if any(place_of(n).stack for n in amax) else ""
    return section(
        "Activation ranges",
        paragraph(
            "The largest magnitude of inputs that calibration saw, which their scales follow; a "
            "peak in one layer costs the small values there their precision."
        )
        if amax
        else "",
        drawn,
        table(["inputs of", "layers", "least", "most"], rows, numbers=(1, 2, 3), most=_ROWS),
    )


def _resources(report: Report, pictures: _Pictures) -> str:
    limits = {
        **{f"budget of {name}": size for name, size in report.budgets.items() if size},
        "predicted": report.predicted_memory_bytes,
        "peak": report.peak_memory_bytes,
    }
    limits = {name: size for name, size in limits.items() if size}
    values = {name: bytes_text(size) for name, size in limits.items()}
    values["read from the source"] = bytes_text(report.bytes_read)
    values |= {name: f"{taken:.1f} s" for name, taken in report.seconds.items()}
    shown = {f"{n}, {values[n]}": s for n, s in limits.items() if "disk" not in n}
    columns = report.timeline
    drawn = ""
    if columns and len(columns["seconds"]) > 1:
        paint = partial(charts.timeline, columns=columns, limits=shown)
        drawn = pictures.draw("timeline", paint, height=4.4)
    names = ("seconds", "memory", "read", "written")
    rows = [
        [f"{second:.1f}", *map(bytes_text, sizes)]
        for second, *sizes in zip(*(columns.get(name, ()) for name in names), strict=True)
    ]
    step = max(1, len(rows) // 20)
    head = ["second", "memory", "read", "written"]
    listed = table(head, rows[::step], numbers=range(4), most=40)
    return section(
        "Memory and disk",
        facts(values),
        _processes(report),
        drawn,
        folded("By time", listed, unfolded=not drawn),
    )


def _processes(report: Report) -> str:
    """What each of several processes took; the other values are those of the first."""
    if not report.ranks:
        return ""
    keys = ("bytes_read", "peak_weight_bytes", "peak_memory_bytes")
    rows = [
        [str(rank), *(bytes_text(used[key]) for key in keys)]
        for rank, used in enumerate(report.ranks)
    ]
    return paragraph(
        "Of each process; peak, prediction and what is shown over time are of process 0:"
    ) + table(
        ["process", "read", "weights at most", "peak memory"], rows, numbers=range(4), most=_ROWS
    )


def _left_alone(report: Report) -> str:
    reasons = by_reason(report.excluded)
    rows = [
        [reason, counted(sum(names.values()), "module"), ", ".join(names)]
        for reason, names in reasons.items()
    ]
    return section(
        "Left unquantized, and why", table(["reason", "how many", "which"], rows, most=_ROWS)
    )


def _again(report: Report) -> str:
    command = report.command or "The model was in memory: quantize(model, …), export_hf(…)."
    recipe = report.recipe_text
    return section(
        "To do it again",
        code(command),
        paragraph("The recipe:") + code(recipe) if recipe else "",
        paragraph(f"All values are in {REPORT_FILE}."),
    )
