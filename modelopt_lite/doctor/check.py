"""Hold specs to the installed transformers."""

from __future__ import annotations

import time
from collections.abc import Iterable

from packaging.version import Version

from modelopt_lite.doctor.classes import check_classes
from modelopt_lite.doctor.disk import check_names
from modelopt_lite.doctor.experts import check_arithmetic, check_layout
from modelopt_lite.doctor.feeds import check_feeds
from modelopt_lite.doctor.findings import Checked, Finding, Status
from modelopt_lite.doctor.instance import CannotBuildError, Instance, instances, known_here
from modelopt_lite.doctor.norms import check_folds, check_norms
from modelopt_lite.doctor.sharding import check_sharding
from modelopt_lite.doctor.subject import Subject
from modelopt_lite.models.specs import ModelSpec


def check_spec(spec: ModelSpec) -> Checked:
    """Build small models of a spec's type and hold every field to them."""
    start = time.perf_counter()
    checked = _check(spec)
    return Checked(
        checked.model_type,
        checked.status,
        checked.why,
        checked.findings,
        checked.unproven,
        time.perf_counter() - start,
    )


def check_specs(specs: Iterable[ModelSpec]) -> list[Checked]:
    """Check several specs, in order."""
    return [check_spec(spec) for spec in specs]


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
        finding = Finding(
            "model_type",
            f"transformers {installed} knows no {spec.model_type!r}",
            "correct it, or min_transformers_version, or say modeling_source='remote_code'",
        )
        return Checked(spec.model_type, "wrong", findings=(finding,))
    try:
        made = instances(spec.model_type)
    except CannotBuildError as error:
        if early:
            return absent
        finding = Finding(
            "model_type",
            f"no small model can be built: {error}",
            "give instance_spec the config fields that the class has no usable defaults for",
        )
        return Checked(spec.model_type, "wrong", findings=(finding,))
    if made[0].kind == "encoder-decoder":
        return Checked(spec.model_type, "no_causal_lm", f"{type(made[0].model).__name__}")
    subject = examine(spec, made)
    if early and not subject.findings:
        subject.wrong(
            "min_transformers_version",
            f"{spec.min_transformers_version}, and all else holds in {installed}",
            f"write {installed.major}.{installed.minor}",
        )
    elif early:
        return absent
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
    check_norms(subject)
    check_folds(subject)
    check_sharding(subject)
    return subject
