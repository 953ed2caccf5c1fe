"""Make the pages of docs/ that follow from the code: ``python tests/helpers/made_pages.py``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer.main

from modelopt_lite import cli
from modelopt_lite.formats.cache import CACHE_FORMATS
from modelopt_lite.formats.linear import FORMATS
from modelopt_lite.recipes import load_recipe, preset_names

DOCS = Path(__file__).parents[2] / "docs"
HEAD = "Made by `python tests/helpers/made_pages.py`; do not edit."


def commands(command: Any, name: str) -> list[tuple[str, Any]]:
    """Return a command and those below it, by their words."""
    found = [(name, command)]
    for word, below in sorted(getattr(command, "commands", {}).items()):
        found += commands(below, f"{name} {word}")
    return found


def cli_page() -> str:
    """Return the page of all commands and their options."""
    parts = ["# Command line", HEAD]
    parts.append(
        "Exit status: 0 done; 1 an error, or an audit that found one; 2 wrong usage; 3 done, but a "
        "strict run had to fall back; 130 interrupted."
    )
    for name, command in commands(typer.main.get_command(cli.app), "modelopt-lite"):
        words = [p.name.upper() for p in command.params if p.param_type_name == "argument"]
        parts.append(f"## `{' '.join([name, *words])}`")
        parts.append((command.help or "").strip())
        rows = [
            (_names(param), _default(param), (getattr(param, "help", None) or "").strip())
            for param in command.params
            if not getattr(param, "hidden", False)
        ]
        if rows:
            parts.append(_table(("option", "default", "what"), rows))
    return "\n\n".join(part for part in parts if part) + "\n"


def _names(param: Any) -> str:
    if param.param_type_name == "argument":
        return f"`{param.name.upper()}`"
    return ", ".join(f"`{name}`" for name in (*param.opts, *param.secondary_opts))


def _default(param: Any) -> str:
    value = param.default
    if param.required or value is None or callable(value):
        return ""
    if isinstance(value, bool):
        return "yes" if value else ""
    return f"`{value}`"


def formats_page() -> str:
    """Return the page of formats and presets."""
    linear = [
        (f"`{fmt.name}`", f"{fmt.codec.bits:.4g}", str(fmt.group_size or "-"), _inputs(fmt))
        for fmt in FORMATS.values()
    ]
    presets = []
    for name in preset_names():
        recipe = load_recipe(name)
        what = recipe.description
        algorithm = recipe.algorithm.method
        presets.append((f"`{name}`", f"`{recipe.format}`", algorithm, recipe.kv_cache or "-", what))
    caches = ", ".join(f"`{name}`" for name in CACHE_FORMATS)
    parts = [
        "# Formats",
        HEAD,
        "A recipe names a format for weights and inputs together, an algorithm that chooses "
        "scales, and what to leave. Presets are recipes that come with the package; `modelopt-lite "
        "recipes show NAME` prints one. Bits count scales. [Who loads what](clients.md) tells "
        "which engines load which; [Numerics](numerics.md) the arithmetic.",
        "## Of linear layers and experts",
        _table(("format", "bits a weight", "block", "inputs"), linear),
        "## Of key and value caches",
        f"{caches}: `--kv-cache`.",
        "## Presets",
        _table(("recipe", "format", "algorithm", "cache", "what it does"), presets),
    ]
    return "\n\n".join(parts) + "\n"


def _inputs(fmt: Any) -> str:
    rounding = fmt.inputs
    if not rounding.bits:
        return "left as they are"
    when = "static scale" if fmt.static_input else "a scale at run time"
    return f"{rounding.kind} of {rounding.bits} bits, {when}"


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join(f"| {' | '.join(_cell(c) for c in line)} |" for line in lines)


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())


PAGES = {"cli.md": cli_page, "formats.md": formats_page}


def main() -> None:
    """Write them."""
    for name, make in PAGES.items():
        (DOCS / name).write_text(make(), encoding="utf-8")


if __name__ == "__main__":
    main()
