"""Parts of a page that needs nothing beside itself; what comes from outside is escaped."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape

# Nothing is loaded, and nothing runs, whatever a name in a checkpoint tries.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
_STYLE = """
:root { color-scheme: light; }
body { font: 15px/1.5 system-ui, sans-serif; color: #1c1c1c; background: #fff;
  max-width: 68rem; margin: 0 auto; padding: 1rem; }
h1 { font-size: 1.5rem; overflow-wrap: anywhere; }
h2 { font-size: 1.15rem; margin: 2rem 0 .5rem; border-bottom: 1px solid #ddd; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { text-align: left; vertical-align: top; padding: .15rem .9rem .15rem 0;
  border-bottom: 1px solid #eee; }
th { white-space: nowrap; }
td { overflow-wrap: break-word; }
td.long { overflow-wrap: anywhere; min-width: 9rem; }
td.number, th.number { text-align: right; white-space: nowrap; }
pre { background: #f5f5f5; padding: .6rem; white-space: pre-wrap; overflow-wrap: anywhere; }
.chart { margin-top: .6rem; overflow-x: auto; }
svg { width: 100%; min-width: 36rem; height: auto; }
details { margin: .5rem 0; }
summary { cursor: pointer; color: #444; }
.warning { border-left: 4px solid #d62728; padding: .1rem .8rem; background: #fdf1f1; }
.cold { color: #d62728; font-weight: 600; }
small { color: #666; }
"""


def page(title: str, parts: Iterable[str]) -> str:
    """Return a whole document of parts that are HTML already."""
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        + "\n".join(parts)
        + "\n</body>\n</html>\n"
    )


def section(title: str, *parts: str) -> str:
    """Return parts below a heading; nothing where there are none."""
    inside = "\n".join(part for part in parts if part)
    return f"<section>\n<h2>{escape(title)}</h2>\n{inside}\n</section>" if inside else ""


def paragraph(text: str, kind: str = "") -> str:
    """Return a text as a paragraph."""
    return f'<p class="{kind}">{escape(text)}</p>' if kind else f"<p>{escape(text)}</p>"


def bullets(texts: Iterable[str], kind: str = "") -> str:
    """Return texts as a list; nothing where there are none."""
    items = "".join(f"<li>{escape(text)}</li>" for text in texts)
    return f'<ul class="{kind}">{items}</ul>' if items else ""


def code(text: str) -> str:
    """Return a text as it is."""
    return f"<pre><code>{escape(text)}</code></pre>"


def facts(values: Mapping[str, str]) -> str:
    """Return names and values."""
    rows = "".join(
        f'<tr><th scope="row">{escape(name)}</th><td class="long">{escape(value)}</td></tr>'
        for name, value in values.items()
    )
    return f'<div class="scroll"><table>{rows}</table></div>'


def folded(title: str, inside: str, *, unfolded: bool) -> str:
    """Return a part that a reader can open and close; nothing where it is empty."""
    start = " open" if unfolded else ""
    return (
        f"<details{start}><summary>{escape(title)}</summary>\n{inside}</details>" if inside else ""
    )


def table(
    head: Sequence[str], rows: Sequence[Sequence[str]], *, numbers: Sequence[int] = (), most: int
) -> str:
    """Return a table of the first rows, and how many there are more; nothing without rows.

    Args:
        head: Names of the columns.
        rows: Their cells.
        numbers: Columns that hold numbers.
        most: Rows that are shown.
    """
    if not rows:
        return ""
    kinds = [' class="number"' if n in numbers else "" for n in range(len(head))]
    top = "".join(
        f'<th scope="col"{k}>{escape(name)}</th>' for k, name in zip(kinds, head, strict=True)
    )
    body = "".join(
        "<tr>"
        + "".join(f"<td{k}>{escape(cell)}</td>" for k, cell in zip(kinds, row, strict=True))
        + "</tr>\n"
        for row in rows[:most]
    )
    more = len(rows) - most
    rest = paragraph(f"… and {more:,} more; the JSON report has all.") if more > 0 else ""
    return (
        f'<div class="scroll"><table><thead><tr>{top}</tr></thead>\n<tbody>{body}</tbody></table>'
        f"</div>{rest}"
    )
