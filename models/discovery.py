"""Find every model package: beside this file, at entry points, in folders of the user."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import os
import traceback
from collections.abc import Callable, MutableSequence
from pathlib import Path

from modelopt_lite.models.registry import expect, get_spec

ENTRY_POINT_GROUP = "modelopt_lite.models"
PATH_VARIABLE = "MODELOPT_LITE_MODELS_PATH"


def import_all(package: str, search_path: MutableSequence[str]) -> None:
    """Note the packages beside this file; import those of entry points and the user's folders.

    Args:
        package: Name of the package that the model packages belong to.
        search_path: Its ``__path__``; the user's folders are appended, so that a model package
            found there can import its own modules like one of ours.

    Raises:
        ImportError: Its ``name`` is ``package``, its message one line. Two places describe one
            model type (both are named), a place raises (the file, the line and the error are
            given) or registers no spec of its own name, or a user's folder does not exist or holds
            no model package.
    """
    try:
        found = _packages(Path(search_path[0]))
        expect(found)
        _import_entry_points()
        for entry in filter(None, os.environ.get(PATH_VARIABLE, "").split(os.pathsep)):
            folder = Path(entry).expanduser().resolve()
            if not folder.is_dir():
                raise _PlaceError(
                    f"{PATH_VARIABLE} names {entry!r}, which is no folder; correct it"
                )
            search_path.append(str(folder))
            if not _import_folder(package, folder, found):
                raise _PlaceError(
                    f"{PATH_VARIABLE} names {entry!r}, which holds no <model_type>/specs.py; "
                    "name the folder above the model's own"
                )
    except _PlaceError as error:
        raise ImportError(str(error), name=package) from error.__cause__


class _PlaceError(Exception):
    """A place of model specs is unusable."""


def _packages(folder: Path) -> dict[str, Path]:
    """Map model types to ``<type>/specs.py`` under ``folder``, sorted."""
    return {file.parent.name: file for file in sorted(folder.glob("*/specs.py"))}


def _import_folder(package: str, folder: Path, found: dict[str, Path]) -> int:
    """Import ``<type>/specs.py`` under ``folder`` in sorted order; return how many."""
    files = _packages(folder)
    for model_type, file in files.items():
        if model_type in found:
            raise _PlaceError(
                f"model_type {model_type!r} has two packages: {found[model_type]} and {file}; "
                "remove one of them"
            )
        found[model_type] = file
        module = f"{package}.{model_type}.specs"
        _load(model_type, str(file), functools.partial(importlib.import_module, module))
    return len(files)


def _import_entry_points() -> None:
    entries = importlib.metadata.entry_points(group=ENTRY_POINT_GROUP)
    for entry in sorted(entries, key=lambda entry: entry.name):
        place = f"entry point {entry.name!r} = {entry.value!r} of group {ENTRY_POINT_GROUP!r}"
        _load(entry.name, place, entry.load)


def _load(model_type: str, place: str, load: Callable[[], object]) -> None:
    """Import ``place``, which must register the type that it is named after."""
    try:
        load()
    except Exception as error:  # a spec is code: it may raise anything
        raise _PlaceError(
            f"{place} cannot be loaded: {_told(error, place)}; correct it, or remove it (folders "
            f"are named by {PATH_VARIABLE})"
        ) from error
    if get_spec(model_type) is None:
        raise _PlaceError(
            f"{place} registers no spec for {model_type!r}; call "
            f"register(ModelSpec(model_type={model_type!r}, ...)) there, or rename it"
        )


def _told(error: Exception, file: str) -> str:
    """Return an error's class and message in one line, with the last line of ``file`` it passed."""
    lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == file]
    if isinstance(error, SyntaxError) and error.filename == file:
        lines.append(error.lineno)
    message = " ".join(str(error).split())
    return f"{f'line {lines[-1]}: ' if lines else ''}{type(error).__name__}: {message}"
