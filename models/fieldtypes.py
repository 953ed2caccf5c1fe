"""Check that the fields of a record hold what their annotations say."""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from collections.abc import Callable
from typing import Any, Literal


def is_tuple_hint(hint: Any) -> bool:
    """Return whether a resolved annotation is a tuple type, or a union with one in it."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return any(is_tuple_hint(part) for part in typing.get_args(hint))
    return hint is tuple or typing.get_origin(hint) is tuple


@functools.cache
def _test_of(hint: Any) -> Callable[[object], bool]:
    """Return the test for a resolved annotation: elements of tuples and dicts are tested too.

    Importing the registry runs it on every field of every spec, so the annotation is read once.
    """
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return lambda value: value in parts
    if origin is Callable:
        return callable
    tests = [_test_of(part) for part in parts if part is not ...]
    if origin in (typing.Union, types.UnionType):
        return lambda value: any(test(value) for test in tests)
    if origin is tuple and parts[-1] is ...:
        (each,) = tests
        return lambda value: isinstance(value, tuple) and all(map(each, value))
    if origin is tuple:
        return lambda value: (
            isinstance(value, tuple)
            and len(value) == len(tests)
            and all(test(item) for test, item in zip(tests, value, strict=True))
        )
    if origin is dict:
        of_key, of_value = tests
        return lambda value: (
            isinstance(value, dict)
            and all(map(of_key, value))
            and all(map(of_value, value.values()))
        )
    wanted = type(None) if hint is None else hint
    return lambda value: hint is Any or isinstance(value, wanted)


@functools.cache
def _fields(cls: type) -> tuple[tuple[str, Any, Any, Callable[[object], bool]], ...]:
    """Return (name, default, annotation, test) of each field of a record."""
    hints = typing.get_type_hints(cls)
    given = {field.name: field.default for field in dataclasses.fields(cls)}
    return tuple((name, given[name], hint, _test_of(hint)) for name, hint in hints.items())


def check_fields(record: object) -> None:
    """Raise `TypeError` that names the first field of a record whose value is of another type."""
    cls: Any = type(record)  # mypy takes a class with __hash__ for something unhashable
    for name, default, hint, test in _fields(cls):
        value = getattr(record, name)
        if value is default or test(value):
            continue
        if is_tuple_hint(hint) and not isinstance(value, tuple):
            # ("Name") is a string: without this check it would be read letter by letter.
            raise TypeError(
                f"{cls.__name__}.{name} must be a tuple, got {value!r}; "
                "a tuple of one element ends with a comma: ('name',)"
            )
        wanted = hint.__name__ if isinstance(hint, type) else hint
        raise TypeError(f"{cls.__name__}.{name} must be {wanted}, got {value!r}")
