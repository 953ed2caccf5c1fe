"""What the commands share: how they print, and how torch is set up for them."""

from __future__ import annotations

import io
import json
import os
from typing import Annotated, Any

import typer
from rich.console import Console

from modelopt_lite.jsons import finite
from modelopt_lite.words import printable

Trust = Annotated[
    bool, typer.Option("--trust-remote-code", help="Allow code that the checkpoint brings.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]

_WIDE = 10_000  # columns: what goes to a file or another program is not wrapped


def show(what: Any) -> None:
    """Print for a person, to the width of the terminal; elsewhere unwrapped and not padded."""
    console = Console()
    if console.is_terminal:
        console.print(what)
        return
    lines = Console(width=_WIDE, file=io.StringIO(), color_system=None)
    lines.print(what)
    for line in lines.file.getvalue().splitlines():  # type: ignore[attr-defined]
        typer.echo(printable(line.rstrip()))


def show_error(code: str, message: str) -> None:
    """Print an error and its code on stderr."""
    typer.secho(printable(f"error [{code}]: {message}"), err=True, fg=typer.colors.RED)


def print_json(value: Any) -> None:
    """Print JSON: what is of none of its types as text, NaN and infinity as null."""
    text = json.dumps(finite(value), indent=2, ensure_ascii=False, default=str)
    typer.echo(printable(text))


def set_up_torch() -> None:
    """Set what torch's libraries read from the environment as they are loaded.

    Threads that wait for each other spin by default: where other processes want the processors, a
    run of many small products then takes ten times as long.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("LRU_CACHE_CAPACITY", "64")
    from modelopt_lite.offload.memory import bound_caches

    bound_caches()


def plain(value: Any) -> str:
    """Return a value as text; a sequence of sequences takes a line for each."""
    if isinstance(value, dict):
        return "\n".join(f"{key}: {plain(item)}" for key, item in value.items()) or "-"
    if isinstance(value, tuple | list):
        nested = any(isinstance(item, tuple | list) for item in value)
        return ("\n" if nested else ", ").join(map(_element, value)) or "-"
    return "-" if value is None else str(value)


def _element(value: Any) -> str:
    """The same inside of a sequence; a sequence stands in parentheses."""
    if isinstance(value, tuple | list):
        return f"({', '.join(map(_element, value))})"
    return str(value)
