"""Charts as SVG, drawn by matplotlib, which is the extra ``report``.

Nothing of matplotlib's global state is used or changed. Texts stay texts, so that they can be
searched and copied; the same values give the same bytes.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from modelopt_lite.words import bytes_unit

COLD = "#d62728"
_SERIES = 8
_SIZE = (11.0, 3.6)  # inches
_DECADES = 100  # a range of so much is shown on a logarithmic scale
_MARKS = 400  # cold experts that get a cross beside their colour
_STYLE = {
    "svg.fonttype": "none",
    "text.parse_math": False,
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e4e4e4",
    "axes.axisbelow": True,
}
_IDS = re.compile(r'(\bid="|href="#|url\(#)')


def available() -> bool:
    """Whether matplotlib is installed, and can be imported."""
    try:
        import matplotlib.backends.backend_svg  # noqa: F401
    except ImportError:
        return False
    return True


def draw(name: str, paint: Callable[[Any], None], *, height: float = _SIZE[1]) -> str:
    """Return the ``<svg>`` element of a figure.

    Args:
        name: Sets its ids apart from those of others on the same page.
        paint: Draws into the matplotlib ``Figure`` that it is given.
        height: In inches.
    """
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    with matplotlib.rc_context({**_STYLE, "svg.hashsalt": name}):
        figure = Figure(figsize=(_SIZE[0], height), layout="constrained")
        FigureCanvasSVG(figure)
        paint(figure)
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    svg = text.getvalue()
    return _IDS.sub(rf"\g<1>{name}-", svg[svg.index("<svg") :])


def by_layer(
    figure: Any,
    series: Mapping[str, Mapping[tuple[str, int], float]],
    label: str,
    *,
    log: bool,
) -> None:
    """Draw a line for each kind over the numbers of layers; those of no layer are left out.

    Args:
        figure: Where to draw.
        series: Kind -> (stack, number) -> value.
        label: Of the vertical axis.
        log: Whether that is logarithmic; values that are not positive are then left out.
    """
    axes = figure.subplots()
    stacks = {stack for values in series.values() for stack, _ in values if stack}
    for kind, values in series.items():
        for stack in dict.fromkeys(stack for stack, _ in values if stack):
            points = sorted((n, v) for (s, n), v in values.items() if s == stack)
            points = [(n, v) for n, v in points if v > 0 or not log]
            name = f"{stack} {kind}" if len(stacks) > 1 else kind
            axes.plot(
                *([list(side) for side in zip(*points, strict=True)] or [[], []]),
                marker="o",
                markersize=3,
                linewidth=1,
                label=name,
            )
    if log:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("")
    else:
        axes.set_ylim(bottom=0, top=1.15 * axes.dataLim.ymax if axes.dataLim.ymax > 0 else None)
    axes.set_xlabel("layer")
    axes.set_ylabel(label)
    axes.xaxis.get_major_locator().set_params(integer=True)
    figure.legend(loc="outside right upper", frameon=False)


def sizes(figure: Any, layers: Mapping[str, Sequence[int]]) -> None:
    """Draw the bytes of each layer, (source, export), as bars."""
    axes = figure.subplots()
    places = range(len(layers))
    most = max((size for both in layers.values() for size in both), default=0)
    unit, name_of_unit = bytes_unit(most)
    for column, (name, color) in enumerate((("source", "#c7c7c7"), ("export", "#1f77b4"))):
        axes.bar(
            [x + 0.4 * column - 0.2 for x in places],
            [both[column] / unit for both in layers.values()],
            width=0.4,
            color=color,
            label=name,
        )
    step = max(1, len(layers) // 12)
    shown = [*places][::step]
    names = [*layers]
    axes.set_xticks(shown, [names[n].rpartition(".")[2] for n in shown])
    axes.set_xlabel("layer")
    axes.set_ylabel(name_of_unit)
    figure.legend(loc="outside right upper", frameon=False)


def heat_map(figure: Any, tokens: Mapping[str, Sequence[int]]) -> None:
    """Draw how many tokens each expert saw: a row for each layer; red where it saw none."""
    import numpy as np
    from matplotlib.colors import ListedColormap, LogNorm, Normalize

    width = max(len(row) for row in tokens.values())
    counts = np.full((len(tokens), width), np.nan)
    for line, row in enumerate(tokens.values()):
        counts[line, : len(row)] = row
    axes = figure.subplots()
    axes.grid(visible=False)
    seen = np.ma.masked_where(~(counts > 0), counts)
    place = {"aspect": "auto", "interpolation": "nearest"}
    if seen.count():
        low, high = float(seen.min()), float(seen.max())
        wide = high > _DECADES * low  # else a logarithmic scale has no two marks
        norm = LogNorm(low, high) if wide else Normalize(0, high)
        shown = axes.imshow(seen, norm=norm, cmap="viridis", **place)
        bar = figure.colorbar(shown, label="tokens", format="{x:g}")
        bar.ax.yaxis.set_minor_formatter("")
    cold = np.argwhere(counts == 0)
    if len(cold):
        red = np.ma.masked_where(counts != 0, np.ones_like(counts))
        axes.imshow(red, cmap=ListedColormap([COLD]), vmin=0, vmax=1, **place)
        if len(cold) <= _MARKS:
            axes.plot(cold[:, 1], cold[:, 0], "x", color="white", markersize=4, linestyle="none")
    step = max(1, len(tokens) // 16)
    names = [*tokens][::step]
    axes.set_yticks(range(0, len(tokens), step), names, fontsize=7)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_xlabel("expert")


def timeline(
    figure: Any, columns: Mapping[str, Sequence[float]], limits: Mapping[str, float]
) -> None:
    """Draw memory, and below it what was read and written, over the seconds of a run.

    Args:
        figure: Where to draw.
        columns: As `Timeline.columns` gives them.
        limits: What to draw as a level -> bytes of memory.
    """
    memory, disk = figure.subplots(2, 1, sharex=True)
    seconds = columns["seconds"]
    used = (*columns["memory"], *columns["device"], *limits.values())
    unit, name_of_unit = bytes_unit(max(used, default=0))
    names = ("memory", "device") if any(columns["device"]) else ("memory",)
    for name in names:
        memory.plot(seconds, [v / unit for v in columns[name]], marker=".", linewidth=1, label=name)
    for (name, value), color in zip(limits.items(), ("#d62728", "#ff7f0e", "#9467bd", "#8c564b")):  # noqa: B905  few of both
        memory.axhline(value / unit, color=color, linestyle="--", linewidth=1, label=name)
    memory.set_ylim(bottom=0)
    memory.set_ylabel(f"{name_of_unit} in use")
    moved = (*columns["read"], *columns["written"])
    unit, name_of_unit = bytes_unit(max(moved, default=0))
    for name in ("read", "written"):
        disk.plot(seconds, [v / unit for v in columns[name]], marker=".", linewidth=1, label=name)
    disk.set_ylabel(f"{name_of_unit}, summed up")
    disk.set_xlabel("seconds")
    for axes in (memory, disk):
        axes.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
