"""Keep what was measured of an export in its report, its page and its card."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from modelopt_lite.errors import OutputError
from modelopt_lite.jsons import finite
from modelopt_lite.locks import awaited
from modelopt_lite.pages.card import update_card
from modelopt_lite.pages.report_page import report_page
from modelopt_lite.paths import asked_path
from modelopt_lite.report import PAGE_FILE, REPORT_FILE, Report, write_whole


def read_report(export: Path) -> tuple[Path, Report]:
    """Return the report of a finished export, and the folder that it lies in.

    That is the folder above, where an export in several dialects has one folder for each.

    Raises:
        OutputError: There is none, or it is not one of this program.
    """
    for folder in (export, export.parent):
        path = folder / REPORT_FILE
        if not path.is_file():
            continue
        with _no_report(path):
            data = json.loads(path.read_text(encoding="utf-8"))
            data.pop("bits_per_weight", None)
            Report(**data)  # a field that is none of ours
            report: Report = TypeAdapter(Report).validate_python(data)
        if folder == export or export.name in report.dialects:
            return folder, report
    raise OutputError(
        f"{export} has no {REPORT_FILE}: it is no finished export of this program; give the "
        "folder that quantize_and_export wrote"
    )


@contextmanager
def _no_report(path: Path) -> Iterator[None]:
    """Give what a file that someone changed fails at as `OutputError`."""
    try:
        yield
    except (ValueError, TypeError, AttributeError, LookupError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise OutputError(
            f"{path} is no report of this program ({reason}); export again with overwrite=True "
            "(--overwrite)"
        ) from error
    except OSError as error:
        raise OutputError(f"{path}: cannot be read ({error.strerror})") from error


def text_label(file: str | None) -> str:
    """Return what a measurement on a text is told to be on; None: the text that is bundled."""
    return "text of CPython" if file is None else Path(file).name


def check_recordable(export: str | Path) -> None:
    """Refuse what `record` would refuse, before hours are spent on measuring it.

    Raises:
        OutputError: There is no export, or it is one in several dialects.
    """
    _place(export)


def _place(export: str | Path) -> tuple[Path, Path, str]:
    """Return the folder of an export, that of its report, and the dialect where the two differ."""
    given = asked_path(export, OutputError).resolve()
    folder, report = read_report(given)
    if folder == given and len(report.dialects) > 1:
        raise OutputError(
            f"{export} holds an export in each of {', '.join(report.dialects)}; give the folder "
            "of the one that was measured"
        )
    return given, folder, given.name if given != folder else ""


def record(export: str | Path, measured: Mapping[str, Any]) -> None:
    """Add a row to the accuracy of an export, in the place of an earlier one of the same name.

    Several processes may do so at once, and may be killed: each file is always a whole one.

    Args:
        export: Folder of the export, or of one of its dialects.
        measured: ``on`` names what was measured; the others are numbers by the names of
            `modelopt_lite.pages.accuracy`.

    Raises:
        OutputError: There is no export, or it cannot be written.
    """
    given, folder, part = _place(export)
    known = {name: value for name, value in measured.items() if value is not None}
    row = {"part": part, **finite(known)}  # what is not finite stands for nothing known by now
    try:
        with awaited(folder):
            report = read_report(given)[1]  # anew, as another process may have added to it
            _add(report.accuracy, row)
            with _no_report(folder / REPORT_FILE):
                page = report_page(report)
            report.write(folder)
            write_whole(folder / PAGE_FILE, page)
            update_card(given, report, part or report.dialects[0])
    except OSError as error:
        raise OutputError(
            f"{folder}: what was measured cannot be written ({error.strerror}); make it writable"
        ) from error


def _add(accuracy: list[dict[str, Any]], row: dict[str, Any]) -> None:
    """Add a row, or its values to the one of the same name."""
    for old in accuracy:
        if (old.get("on"), old.get("part", "")) == (row["on"], row["part"]):
            old.update(row)
            return
    accuracy.append(row)
