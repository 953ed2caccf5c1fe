"""Describe a model by what tells it from another one that it was built after."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from modelopt_lite.models.specs import ModelSpec


def variant(base: ModelSpec, model_type: str, **changes: Any) -> ModelSpec:
    """Return ``base`` under another model type, with changes.

    Args:
        base: The spec of the model that this one shares its layers with.
        model_type: That of the new spec.
        **changes: Fields of `ModelSpec`. A mapping changes single fields of the section that
            ``base`` has; anything else takes its place.

    Raises:
        TypeError: A mapping for a section that ``base`` lacks, or an unknown field.
    """
    fields = {
        name: _changed(base, name, value) if isinstance(value, Mapping) else value
        for name, value in changes.items()
    }
    return replace(base, model_type=model_type, **fields)


def _changed(base: ModelSpec, name: str, fields: Mapping[str, Any]) -> Any:
    section: Any = getattr(base, name, None)
    if section is None:
        raise TypeError(
            f"the spec of {base.model_type!r} has no {name} to change; give a whole section"
        )
    return replace(section, **fields)
