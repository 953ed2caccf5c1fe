"""Write the command that does the same again."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_NO_MATTER = frozenset({"progress", "overwrite", "resume"})


def command_line(ckpt: str | Path, given: Mapping[str, Any], defaults: Mapping[str, Any]) -> str:
    """Return the command with the arguments of `quantize_and_export` that are not the defaults.

    What was given in memory has a file's name there, with a line above that says what it stands
    for.

    Args:
        ckpt: The checkpoint.
        given: Name of an argument -> its value.
        defaults: The same for the defaults.
    """
    words, remarks = ["modelopt-lite", "quantize", str(ckpt)], []
    for name, value in given.items():
        if name in _NO_MATTER or value is None or _equal(value, defaults.get(name)):
            continue
        flag = f"--{name.replace('_', '-')}"
        if isinstance(value, bool):
            words.append(flag if value else f"--no-{flag.removeprefix('--')}")
            continue
        text, remark = _text(name, value)
        words += [_in_memory_flag(name, flag, remark), text]
        if remark:
            remarks.append(f"# {remark}")
    return "\n".join([*remarks, shlex.join(words)])


def _equal(value: Any, default: Any) -> bool:
    return type(value) is type(default) and bool(value == default)


def _in_memory_flag(name: str, flag: str, remark: str) -> str:
    return "--offload-config" if name == "offload" and remark else flag


def _text(name: str, value: Any) -> tuple[str, str]:
    """Return how a value is written, and what it stands for where it cannot be."""
    if isinstance(value, str | Path | int | float):
        return str(value), ""
    if name == "dialect" and isinstance(value, Sequence):
        return ("both", "") if len(value) > 1 else (str(value[0]), "")
    if name == "recipe":
        file = f"{value.name}.yaml"
        return file, f"{file}: the recipe below"
    if name == "device":
        return str(value), ""
    file = {"calib_data": "calibration.safetensors", "offload": "offload.yaml"}.get(name, name)
    return file, f"{file}: {name} was given in memory, as {type(value).__name__}"
