"""The journal of a run: what is finished and safe on disk, so that a later run can go on from it.

One JSON line for each finished unit, appended and synced after everything that the line speaks of.
The first line says what the run's bytes depend on; a journal of other inputs is refused. A line
that was cut off by a crash ends the journal: what it spoke of is done again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from modelopt_lite.errors import OutputError

JOURNAL = "journal"  # its folder, beside the one that is written to
_FILE = "journal.jsonl"
_VERSION = 2


class Journal:
    """Entries of finished units, in the order in which they were finished.

    Args:
        folder: Where the journal and what its entries name is kept; made where it is missing.
        inputs: All that the bytes of the export depend on, as JSON values.
        reads: Another process writes it; this one only reads what an earlier run finished.

    Attributes:
        entries: What an earlier run finished; empty where there was none.

    Raises:
        OutputError: The journal there is of a run with other inputs; the difference is named.
    """

    def __init__(self, folder: Path, inputs: Mapping[str, Any], *, reads: bool = False) -> None:
        self.folder = Path(folder)
        try:
            self.folder.mkdir(exist_ok=True)
        except OSError as error:
            raise _unwritable(self.folder, error) from error
        header = {"version": _VERSION, "inputs": json.loads(json.dumps(inputs))}
        found = _read(self.folder / _FILE)
        self.entries: list[dict[str, Any]] = found[1:]
        if self.entries and found[0] != header:
            raise OutputError(
                f"the unfinished export in {self.folder} was begun with other inputs: "
                f"{difference(found[0], header)}. Go on with what it was begun with, or start anew "
                "with resume=False (--no-resume)"
            )
        if not self.entries and not reads:
            self._write([header])

    def add(self, entry: Mapping[str, Any]) -> None:
        """Append an entry; on return it is on disk. Call it when what it speaks of is.

        Raises:
            OutputError: The disk is full, or failed; what was noted before stays.
        """
        try:
            with (self.folder / _FILE).open("ab") as file:
                file.write(_line(entry))
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise OutputError(
                f"{self.folder}: the journal cannot be written ({error.strerror}); free some space"
            ) from error

    def _write(self, lines: list[Mapping[str, Any]]) -> None:
        try:
            with (self.folder / _FILE).open("wb") as file:
                file.writelines(_line(line) for line in lines)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise _unwritable(self.folder, error) from error


def has_entries(folder: Path, name: str = JOURNAL) -> bool:
    """Whether the journal of a name in a folder says that at least one unit is finished."""
    return len(_read(folder / name / _FILE)) > 1


def difference(old: Any, new: Any, path: str = "") -> str:
    """Name the first place where two JSON values differ, and both values."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in [*old, *(key for key in new if key not in old)]:
            if old.get(key) != new.get(key):
                return difference(old.get(key), new.get(key), f"{path}.{key}" if path else key)
    return f"{path.removeprefix('inputs.')} was {old!r} and is {new!r}"


def _unwritable(folder: Path, error: OSError) -> OutputError:
    return OutputError(f"{folder}: cannot be written ({error.strerror}); choose another export_dir")


def _line(entry: Mapping[str, Any]) -> bytes:
    return json.dumps(entry, separators=(",", ":")).encode() + b"\n"


def _read(path: Path) -> list[dict[str, Any]]:
    """Return the whole lines of a journal, from the first; and cut off what is no whole line."""
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        return []
    lines, whole = [], 0
    for line in raw.splitlines(keepends=True):
        try:
            value = json.loads(line) if line.endswith(b"\n") else None
        except ValueError:
            value = None
        if not isinstance(value, dict):
            os.truncate(path, whole)
            break
        lines.append(value)
        whole += len(line)
    return lines
