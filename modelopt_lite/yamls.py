"""Read YAML of strangers: plain values alone, no deeper and no larger than a person writes."""

from __future__ import annotations

import re
from typing import Any

import yaml

LONGEST = 1 << 20
_DEEPEST = 100  # brackets that are open at once; PyYAML's time grows with the square of them
_BRACKET = re.compile(r"[][{}]")
_MOST = 100_000  # values, each alias as often as it stands


def load_yaml(text: str, loader: type[yaml.SafeLoader] = yaml.SafeLoader) -> Any:
    """Return what a text holds.

    Args:
        text: At most a mebibyte.
        loader: A safe one.

    Raises:
        yaml.YAMLError: It is malformed, has a tag that is no plain value's, is nested too deep, or
            stands for more values than it has letters, as aliases of aliases do.
    """
    if len(text) > LONGEST:
        raise yaml.YAMLError(f"it has {len(text)} characters, and {LONGEST} are read")
    if _depth(text) > _DEEPEST:
        raise yaml.YAMLError("it is nested too deep")
    try:
        value = yaml.load(text, Loader=loader)
    except yaml.YAMLError:
        raise
    except RecursionError as error:
        raise yaml.YAMLError("it is nested too deep") from error
    except Exception as error:  # PyYAML lets through what int(), float() and date() raise
        raise yaml.YAMLError(f"a value cannot be read: {error}") from error
    if _count(value, {}, set()) > _MOST:
        raise yaml.YAMLError(f"its aliases stand for more than {_MOST} values")
    return value


def _depth(text: str) -> int:
    """Return how many brackets are open at most; those inside of strings count, too."""
    depth = most = 0
    for bracket in _BRACKET.findall(text):
        depth += 1 if bracket in "[{" else -1
        most = max(most, depth)
    return most


def _count(value: Any, known: dict[int, int], above: set[int]) -> int:
    """Count values; what several aliases name is counted for each, and visited once."""
    if not isinstance(value, list | tuple | dict | set):
        return 1
    if id(value) in above:
        raise yaml.YAMLError("an alias stands inside of what it names")
    if id(value) not in known:
        inside = above | {id(value)}
        items = [*value.keys(), *value.values()] if isinstance(value, dict) else value
        known[id(value)] = 1 + sum(_count(item, known, inside) for item in items)
    return known[id(value)]
