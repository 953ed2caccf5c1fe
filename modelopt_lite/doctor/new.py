"""Write the first draft of a spec, and hold it to the models that it was read off."""

from __future__ import annotations

import os
from pathlib import Path

from modelopt_lite.build import quiet_transformers
from modelopt_lite.checkpoint.reader import read_json
from modelopt_lite.doctor.check import checked_against
from modelopt_lite.doctor.draft import draft_spec
from modelopt_lite.doctor.findings import Checked
from modelopt_lite.doctor.instance import (
    CannotBuildError,
    instances,
    instances_of_checkpoint,
    known_here,
)
from modelopt_lite.doctor.source import write_package
from modelopt_lite.errors import SpecError
from modelopt_lite.models import get_spec
from modelopt_lite.models.discovery import PATH_VARIABLE
from modelopt_lite.paths import asked_path


def write_first_draft(
    what: str, folder: str | None = None, *, trust_remote_code: bool = False
) -> tuple[Path, Checked, int]:
    """Describe a model that has no spec yet, and write the description.

    Args:
        what: Folder of a checkpoint, whose config is read, or a type that transformers knows.
        folder: Where to write ``<model_type>/specs.py``; None: the first folder that
            MODELOPT_LITE_MODELS_PATH names.
        trust_remote_code: Allow code that the checkpoint brings.

    Returns:
        The file; the check of what it says; how many TODOs it holds.

    Raises:
        SpecError: The type has a spec; nothing can be built; or no folder is given.
        RemoteCodeError: The model's code comes with the checkpoint and was not trusted.
        OutputError: The file exists.
    """
    import transformers

    release = f"transformers {transformers.__version__}"
    target = _folder(folder)
    source = asked_path(what, SpecError)
    try:
        if (source / "config.json").is_file():
            model_type = str(read_json(source / "config.json").get("model_type"))
            _check_new(model_type)
            with quiet_transformers():
                made = instances_of_checkpoint(source, trust_remote_code=trust_remote_code)
            origin = f"the config of {source.resolve().name}, {release}"
        elif known_here(what):
            model_type = what
            _check_new(model_type)
            made = instances(model_type)
            origin = f"its config class, {release}"
        else:
            raise SpecError(
                f"{what!r} is neither a folder with a config.json nor a model type that {release} "
                "knows; give the folder of a checkpoint"
            )
    except CannotBuildError as error:
        raise SpecError(f"{release} cannot build a small model of {what!r}: {error}") from error
    remote_code = type(made[0].config).__module__.startswith("transformers_modules")
    draft = draft_spec(model_type, made, remote_code=remote_code)
    file = write_package(draft, target, origin)
    return file, checked_against(draft.spec, made), len(draft.todo)


def _folder(given: str | None) -> Path:
    folders = [given] if given else os.environ.get(PATH_VARIABLE, "").split(os.pathsep)
    if not folders[0]:
        raise SpecError(
            f"no folder to write to; give one with --to, and name it in {PATH_VARIABLE} to use it"
        )
    return asked_path(folders[0], SpecError)


def _check_new(model_type: str) -> None:
    if get_spec(model_type) is not None:
        raise SpecError(
            f"{model_type!r} has a spec; `modelopt-lite specs check {model_type}` holds it to the "
            "installed transformers"
        )
