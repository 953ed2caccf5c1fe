"""Import every model package: beside this file, from entry points, from folders of the user."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
from collections.abc import MutableSequence
from pathlib import Path

from modelopt_lite.models.registry import get_spec

ENTRY_POINT_GROUP = "modelopt_lite.models"
PATH_VARIABLE = "MODELOPT_LITE_MODELS_PATH"


def import_all(package: str, search_path: MutableSequence[str]) -> None:
    """Import the packages beside this file, then entry points, then the user's folders.

    Args:
        package: Name of the package that the model packages belong to.
        search_path: Its ``__path__``; the user's folders are appended, so that a model package
            found there can import its own modules like one of ours.

    Raises:
        ValueError: Two places describe one model type (both files are named), a place registers
            no spec of its own name, or a user's folder holds no model package.
    """
    found: dict[str, Path] = {}
    _import_folder(package, Path(search_path[0]), found)
    _import_entry_points()
    for entry in filter(None, os.environ.get(PATH_VARIABLE, "").split(os.pathsep)):
        folder = Path(entry).expanduser().resolve()
        search_path.append(str(folder))
        if not _import_folder(package, folder, found):
            raise ValueError(
                f"{PATH_VARIABLE} names {entry!r}, which holds no <model_type>/specs.py; "
                "name the folder above the model's own"
            )


def _import_folder(package: str, folder: Path, found: dict[str, Path]) -> int:
    """Import ``<type>/specs.py`` under ``folder`` in sorted order; return how many."""
    files = sorted(folder.glob("*/specs.py"), key=lambda file: file.parent.name)
    for file in files:
        model_type = file.parent.name
        if model_type in found:
            raise ValueError(
                f"model_type {model_type!r} has two packages: {found[model_type]} and {file}; "
                "remove one of them"
            )
        found[model_type] = file
        importlib.import_module(f"{package}.{model_type}.specs")
        _demand(model_type, str(file))
    return len(files)


def _import_entry_points() -> None:
    entries = importlib.metadata.entry_points(group=ENTRY_POINT_GROUP)
    for entry in sorted(entries, key=lambda entry: entry.name):
        place = f"entry point {entry.name!r} = {entry.value!r}"
        try:
            entry.load()
        except Exception as error:
            error.add_note(f"while loading {place} of group {ENTRY_POINT_GROUP!r}")
            raise
        _demand(entry.name, place)


def _demand(model_type: str, place: str) -> None:
    """Raise unless ``place``, just imported, registered the type it is named after."""
    if get_spec(model_type) is None:
        raise ValueError(
            f"{place} registers no spec for {model_type!r}; call "
            f"register(ModelSpec(model_type={model_type!r}, ...)) there, or rename it"
        )
