"""Give a small config what its class reads and leaves out by default."""

from __future__ import annotations

from typing import Any

from modelopt_lite.doctor.shrink import Sizes, missing_value, shrink


def give_missing(config: Any, fields: dict[str, Any], error: AttributeError, sizes: Sizes) -> bool:
    """Add the field that a model read and its config lacks; return whether that was possible."""
    value = missing_value(str(error.name), sizes)
    if value is None or error.obj is None:
        return False
    if error.obj is config:
        fields[str(error.name)] = value
        return True
    for key in getattr(config, "sub_configs", None) or ():
        part = getattr(config, key, None)
        inside = fields.setdefault(key, {}) if part is not None else None
        if (
            isinstance(inside, dict)
            and (part is error.obj or hasattr(part, "sub_configs"))
            and give_missing(part, inside, error, sizes)
        ):
            return True
    return False


def give_parts(cls: Any, fields: dict[str, Any], sizes: Sizes) -> bool:
    """Add the configs of parts that are None by default; return whether there are such.

    The config class knows of what type they are: it makes one of an empty dict.
    """
    left_out = [key for key in cls().sub_configs if fields.get(key) is None]
    whole = shrink(cls(**{key: {} for key in left_out}), sizes)
    parts = {key: whole[key] for key in left_out if key in whole}
    fields.update(parts)
    return bool(parts)
