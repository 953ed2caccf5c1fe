"""Hold specs to the installed transformers."""

from __future__ import annotations

import time
import traceback
from dataclasses import replace
from pathlib import Path

from packaging.version import Version

from modelopt_lite.checkpoint.reader import read_json
from modelopt_lite.doctor.classes import check_classes
from modelopt_lite.doctor.disk import check_names
from modelopt_lite.doctor.experts import check_arithmetic, check_layout
from modelopt_lite.doctor.feeds import check_feeds
from modelopt_lite.doctor.findings import Checked, Finding, Status
from modelopt_lite.doctor.folds import check_norm_folds
from modelopt_lite.doctor.instance import (
    CannotBuildError,
    Instance,
    instances,
    instances_of_checkpoint,
    known_here,
    told,
)
from modelopt_lite.doctor.norms import check_folds, check_norms
from modelopt_lite.doctor.sharding import check_sharding
from modelopt_lite.doctor.subject import Subject
from modelopt_lite.errors import SpecError
from modelopt_lite.models import get_spec
from modelopt_lite.models.specs import ModelSpec


def check_spec(spec: ModelSpec) -> Checked:
    """Build small models of a spec's type and hold every field to them."""
    start = time.perf_counter()
    try:
        checked = _check(spec)
    except Exception as error:  # one spec must not hide what is found of the others
        line = traceback.extract_tb(error.__traceback__)[-1]
        how = f"failed at {Path(line.filename).name}:{line.lineno}: {told(error)}"
        checked = failed_check(spec, how)
    return replace(checked, seconds=time.perf_counter() - start)


def failed_check(spec: ModelSpec, how: str) -> Checked:
    """Return what a check says that did not come to its end."""
    finding = Finding("the check itself", how, "report it, with the release of transformers")
    return Checked(spec.model_type, "wrong", findings=(finding,))


def check_checkpoint(folder: Path, *, trust_remote_code: bool = False) -> Checked:
    """Hold the spec of a checkpoint's type to small models built from its config.

    Raises:
        SpecError: The type has no spec, or the installed transformers does not know it.
        RemoteCodeError: The model's code comes with the checkpoint and was not trusted.
        CheckpointError: There is no usable config.json.
    """
    start = time.perf_counter()
    model_type = str(read_json(folder / "config.json").get("model_type"))
    if (spec := get_spec(model_type)) is None:
        raise SpecError(
            f"no spec for model_type {model_type!r} of {folder}; "
            f"`modelopt-lite specs new {folder}` writes a first draft"
        )
    try:
        made = instances_of_checkpoint(folder, trust_remote_code=trust_remote_code)
    except CannotBuildError as error:
        raise SpecError(f"no small model can be built from {folder}: {error}") from error
    return replace(checked_against(spec, made), seconds=time.perf_counter() - start)


def _check(spec: ModelSpec) -> Checked:
    import transformers

    installed = Version(transformers.__version__)
    if spec.modeling_source == "remote_code":
        return Checked(spec.model_type, "not_checkable", "its code comes with the checkpoint")
    early = installed < Version(spec.min_transformers_version or "0")
    absent = Checked(
        spec.model_type,
        "absent",
        f"needs transformers {spec.min_transformers_version}, {installed} is installed",
    )
    if not known_here(spec.model_type):
        if early:
            return absent
        if (gone := spec.removed_in_transformers) is not None and installed >= Version(gone):
            return Checked(spec.model_type, "absent", f"transformers {gone} removed it")
        finding = Finding(
            "model_type",
            f"transformers {installed} knows no {spec.model_type!r}",
            "correct it, or min_transformers_version or removed_in_transformers, or say "
            "modeling_source='remote_code'",
        )
        return Checked(spec.model_type, "wrong", findings=(finding,))
    try:
        made = instances(spec.model_type)
    except CannotBuildError as error:
        if early:
            return absent
        why = f"no small model can be built of its defaults ({error}); give one with --ckpt"
        return Checked(spec.model_type, "not_checkable", why)
    if made[0].kind == "encoder-decoder":
        return Checked(spec.model_type, "no_causal_lm", f"{type(made[0].model).__name__}")
    checked = checked_against(spec, made)
    if early and not checked.findings:
        finding = Finding(
            "min_transformers_version",
            f"{spec.min_transformers_version}, and all else holds in {installed}",
            f"write {installed.major}.{installed.minor}",
        )
        return Checked(spec.model_type, "wrong", findings=(finding,))
    return absent if early else checked


def checked_against(spec: ModelSpec, made: list[Instance]) -> Checked:
    """Hold a spec to models that are built already."""
    subject = examine(spec, made)
    status: Status = "wrong" if subject.findings else "ok"
    what = ", ".join(dict.fromkeys(type(m.model).__name__ for m in made))
    return Checked(spec.model_type, status, what, tuple(subject.findings), tuple(subject.unproven))


def examine(spec: ModelSpec, made: list[Instance]) -> Subject:
    """Hold every field of a spec to small models of its type."""
    subject = Subject(spec, made)
    check_classes(subject)
    check_layout(subject)
    check_arithmetic(subject)
    check_names(subject)
    check_feeds(subject)
    check_norm_folds(subject)
    check_norms(subject)
    check_folds(subject)
    check_sharding(subject)
    return subject
