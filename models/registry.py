"""Find a model's spec, and recognise its mixture-of-experts blocks.

Modules are duck-typed: nothing here imports torch or transformers.
"""

from __future__ import annotations

import functools
import importlib
import sys
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from modelopt_lite.models.fieldtypes import is_tuple_hint
from modelopt_lite.models.specs import (
    ModelSpec,
    MoESpec,
    _spec_sections,
    match_class_names,
)

__all__ = [
    "get_spec",
    "get_specs",
    "hf_model_type",
    "is_moe",
    "list_all_possible",
    "match_class_names",
    "match_moe_block",
    "match_moe_model",
    "register",
]

_SPECS: dict[str, ModelSpec] = {}
_PLACES: dict[str, str] = {}  # model_type -> "file:line" of its registration
# model_type -> its specs.py beside this file, which is imported when the type is first asked for:
# a run asks for one or two of them, and importing all takes longer than the rest of the registry.
_OWN: dict[str, Path] = {}

# Ends of class names of MoE blocks of unregistered models. Not "moeblock": JetMoeBlock is a decoder
# layer. transformers 5.0 to 5.12 call some experts containers "...NaiveMoe": those are inside a
# block and no block themselves.
_BLOCK_SUFFIXES = ("moe", "sparsemoeblock", "moelayer")
_CONTAINER_SUFFIX = "naivemoe"
_ROUTER_ATTRIBUTES = ("gate", "router")


def register(spec: ModelSpec) -> ModelSpec:
    """Register ``spec`` under its model type and return it.

    Raises:
        ValueError: The model type is registered already; the message names both places.
    """
    caller = sys._getframe(1)
    file = caller.f_code.co_filename
    place = f"{file}:{caller.f_lineno}"
    other = _PLACES.get(spec.model_type)
    if other is None and file != str(_OWN.get(spec.model_type, file)):
        other = str(_OWN[spec.model_type])
    if other is not None:
        raise ValueError(
            f"model_type {spec.model_type!r} is registered twice: at {other} and at {place}; "
            "remove one of them"
        )
    _SPECS[spec.model_type] = spec
    _PLACES[spec.model_type] = place
    return spec


def expect(own: Mapping[str, Path]) -> None:
    """Take note of the model packages beside this file: model type -> its ``specs.py``, sorted."""
    _OWN.update(own)


def get_spec(model_type: str) -> ModelSpec | None:
    """Return the spec registered for ``model_type``, or None."""
    if model_type not in _SPECS and model_type in _OWN:
        importlib.import_module(f"{__package__}.{model_type}.specs")  # registers it, once
    return _SPECS.get(model_type)


def get_specs() -> list[ModelSpec]:
    """Return all specs: ours, sorted by model type, then the user's as they were registered."""
    own = [spec for spec in map(get_spec, _OWN) if spec is not None]
    return own + [spec for name, spec in _SPECS.items() if name not in _OWN]


def hf_model_type(model: object) -> str | None:
    """Return ``model.config.model_type``, or None where there is none.

    Args:
        model: A model, or a config itself.
    """
    model_type = getattr(getattr(model, "config", model), "model_type", None)
    return model_type if isinstance(model_type, str) and model_type else None


def match_moe_model(module: object, model_type: str | None = None) -> ModelSpec | None:
    """Return the spec whose MoE section describes ``module``, or None.

    Args:
        module: The module to look at.
        model_type: The root config's model type. It is a strict filter: only that model's own
            spec is asked, and an unregistered type gives None even where the class name is
            another model's. None asks all specs.
    """
    if model_type is None:
        candidates = get_specs()
    else:
        own = get_spec(model_type)
        candidates = [] if own is None else [own]
    for spec in candidates:
        if spec.moe_spec is not None and spec.moe_spec.matches(module):
            return spec
    return None


def match_moe_block(module: object, model_type: str | None = None) -> MoESpec | None:
    """Return the MoE layout of ``module``, or None; scoped as ``match_moe_model`` is."""
    spec = match_moe_model(module, model_type)
    return None if spec is None else spec.moe_spec


def is_moe(module: object, model_type: str | None = None) -> bool:
    """Return whether ``module`` is a mixture-of-experts block.

    A spec of ``model_type`` that names its block classes decides alone. Otherwise (the type is
    unregistered, or its spec names no class) a class name that ends like those of MoE blocks is
    taken for one, and so is any module with both a router and experts.

    Args:
        module: The module to look at.
        model_type: The root config's model type. None asks every spec, then goes by name and
            structure.
    """
    if match_moe_model(module, model_type) is not None:
        return True
    own = None if model_type is None else get_spec(model_type)
    if own is not None and own.moe_spec is not None and own.moe_spec.block_names:
        return False
    return _named_like_moe(module) or _built_like_moe(module)


def _named_like_moe(module: object) -> bool:
    names = [cls.__name__.casefold() for cls in type(module).__mro__]
    return any(
        name.endswith(_BLOCK_SUFFIXES) and not name.endswith(_CONTAINER_SUFFIX) for name in names
    )


def _built_like_moe(module: object) -> bool:
    experts = getattr(module, "experts", None)
    # A list of experts has a length, a fused container has parameters; a count has neither.
    is_container = hasattr(experts, "__len__") or hasattr(experts, "parameters")
    routers = (getattr(module, name, None) for name in _ROUTER_ATTRIBUTES)
    return is_container and any(router is not None for router in routers)


def list_all_possible(attr: str) -> tuple[Any, ...]:
    """Return the elements of a tuple-valued attribute over all specs, each once, in order.

    The result is a vocabulary common to all models. Where the model is known, ask its own spec.

    Args:
        attr: A field or property of ``ModelSpec`` or of one of its sections, named without the
            section: ``"gate_up_pairs"``. Specs that lack the section contribute nothing.

    Raises:
        ValueError: ``attr`` is unknown or not tuple-valued. (A string would be taken apart into
            its characters.) The message lists the valid names.
    """
    valid = _tuple_attributes()
    if attr not in valid:
        raise ValueError(
            f"{attr!r} is not a tuple-valued attribute of ModelSpec or its sections; "
            f"choose one of: {', '.join(sorted(valid))}"
        )
    section = valid[attr]
    seen: dict[Any, None] = {}
    for spec in get_specs():
        holder = spec if section is None else getattr(spec, section)
        if holder is not None:
            seen.update(dict.fromkeys(getattr(holder, attr) or ()))
    return tuple(seen)


@functools.cache
def _tuple_attributes() -> dict[str, str | None]:
    """Map each tuple-valued attribute to the field of its section, None for ModelSpec's own."""
    holders: list[tuple[str | None, type]] = [(None, ModelSpec), *_spec_sections().items()]
    found: dict[str, str | None] = {}
    for section, cls in holders:
        hints = typing.get_type_hints(cls)
        for name, member in vars(cls).items():
            if isinstance(member, property) and member.fget is not None:
                hints[name] = typing.get_type_hints(member.fget).get("return")
        for name, hint in hints.items():
            if is_tuple_hint(hint):
                found.setdefault(name, section)
    return found
