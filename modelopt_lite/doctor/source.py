"""A spec as the source of its package."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from modelopt_lite.doctor.draft import Draft
from modelopt_lite.errors import OutputError

_WIDTH = 100


def write_package(draft: Draft, folder: Path, origin: str) -> Path:
    """Write ``<model_type>/specs.py`` below a folder and return its path.

    Args:
        draft: What to write.
        folder: The folder of packages; made where it is missing.
        origin: What the facts were read off, for the comment.

    Raises:
        OutputError: The file exists.
    """
    file = folder / draft.spec.model_type / "specs.py"
    if file.exists():
        raise OutputError(f"{file} exists; remove it, or give another folder with --to")
    file.parent.mkdir(parents=True, exist_ok=True)
    title = f'"""{draft.spec.model_type}."""\n'
    (file.parent / "__init__.py").write_text(title, encoding="utf-8")
    file.write_text(source_of(draft, origin), encoding="utf-8")
    return file


def source_of(draft: Draft, origin: str) -> str:
    """Return the source of a ``specs.py`` that registers a draft."""
    spec = draft.spec
    sections = {
        type(value).__name__
        for f in dataclasses.fields(spec)
        if dataclasses.is_dataclass(value := getattr(spec, f.name))
    }
    names = sorted({"ModelSpec", *sections}, key=str.casefold)
    imports = f"from modelopt_lite.models.specs import {', '.join(names)}"
    if len(imports) > _WIDTH:
        lines = "".join(f"    {name},\n" for name in names)
        imports = f"from modelopt_lite.models.specs import (\n{lines})"
    body = _record(spec, 4, draft.todo, "")
    return (
        f'"""{spec.model_type}: a first draft, written by `modelopt-lite specs new`."""\n\n'
        "from __future__ import annotations\n\n"
        "from modelopt_lite.models.registry import register\n"
        f"{imports}\n\n"
        f"# Measured on small models built from {origin}.\n"
        f"SPEC = register(\n    {body}\n)\n"
    )


def _record(record: Any, indent: int, todo: dict[str, str], path: str) -> str:
    """Write a dataclass, leaving out fields at their defaults unless there is something to do."""
    inner = " " * (indent + 4)
    lines = []
    for f in dataclasses.fields(record):
        value, name = getattr(record, f.name), f"{path}{f.name}"
        if name in todo:
            lines.append(f"{inner}# TODO: {todo[name]}\n")
        elif value == f.default:
            continue
        if dataclasses.is_dataclass(value):
            text = _record(value, indent + 4, todo, f"{name}.")
        else:
            text = _value(value, indent + 4, len(f.name) + 2)
        lines.append(f"{inner}{f.name}={text},\n")
    return f"{type(record).__name__}(\n{''.join(lines)}{' ' * indent})"


def _value(value: Any, indent: int, before: int) -> str:
    """Write a value as ruff formats it: on one line where it fits, else an element a line."""
    flat = _flat(value)
    if indent + before + len(flat) < _WIDTH or not isinstance(value, tuple | dict) or not value:
        return flat
    inner = " " * (indent + 4)
    if isinstance(value, dict):
        lines = "".join(f"{inner}{_flat(k)}: {_flat(v)},\n" for k, v in value.items())
        return f"{{\n{lines}{' ' * indent}}}"
    lines = "".join(f"{inner}{_value(item, indent + 4, 0)},\n" for item in value)
    return f"(\n{lines}{' ' * indent})"


def _flat(value: Any) -> str:
    if isinstance(value, tuple):
        comma = "," if len(value) == 1 else ""
        return f"({', '.join(map(_flat, value))}{comma})"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{_flat(k)}: {_flat(v)}' for k, v in value.items())}}}"
    return f'"{value}"' if isinstance(value, str) else repr(value)
