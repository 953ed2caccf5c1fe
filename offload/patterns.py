"""Patterns over dotted names and classes: parsing, and one linear matcher.

A pattern is ``<glob>`` or ``name:<glob>``, matched with a path, or ``class:<glob>``, matched with
a module's class. In a glob ``*`` stands for any characters and ``?`` for one; all else stands for
itself. A path is matched part by part between its dots. A part that is ``*`` alone stands for
exactly one part of the path where a pattern includes, and for one or more where it excludes (or
selects in a recipe). A class is matched as a whole, dots included.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from modelopt_lite.errors import OffloadConfigError

_KINDS = ("class", "name")


@dataclass(frozen=True, slots=True)
class Pattern:
    """One entry of a list of patterns. ``text`` is the entry without surrounding spaces."""

    kind: Literal["name", "class"]
    body: str
    text: str

    def matches_name(self, path: str, *, star_spans: bool) -> bool:
        """Whether a whole path matches; a class pattern matches none."""
        return self.kind == "name" and match_name(self.body, path, star_spans=star_spans)

    def matches_class(self, cls: type) -> bool:
        """Whether a class matches by its short or its full name; its bases do not count."""
        return self.kind == "class" and (
            match_part(self.body, cls.__name__)
            or match_part(self.body, f"{cls.__module__}.{cls.__qualname__}")
        )


def parse_pattern(entry: object, *, index: int = 0, field: str = "patterns") -> Pattern:
    """Read one entry.

    Args:
        entry: What the user wrote.
        index: Its place in the list, for the message.
        field: The list's name, for the message.

    Raises:
        OffloadConfigError: Not a string, empty, an empty body, or an unknown prefix. A path that
            holds a colon is written ``name:<path>``.
    """
    where = f"{field}[{index}]"
    if not isinstance(entry, str):
        raise OffloadConfigError(
            f"{where} is {entry!r}, a {type(entry).__name__}; patterns are strings"
        )
    text = entry.strip()
    if not text:
        raise OffloadConfigError(f"{where} is empty ({entry!r}); remove it, or use '*' for all")
    prefix, colon, body = text.partition(":")
    if not colon:
        return Pattern("name", text, text)
    body = body.strip()
    if prefix not in _KINDS:
        raise OffloadConfigError(
            f"{where} {text!r} begins with neither 'class:' nor 'name:'; did you mean "
            f"{_nearest_form(prefix, body, text)!r}?"
        )
    if not body:
        raise OffloadConfigError(
            f"{where} {text!r} has nothing after the colon; write {prefix}:<glob> or remove it"
        )
    kind: Literal["name", "class"] = "class" if prefix == "class" else "name"
    return Pattern(kind, body, f"{prefix}:{body}")


def _nearest_form(prefix: str, body: str, text: str) -> str:
    near = difflib.get_close_matches(prefix.strip().lower(), _KINDS, n=1)
    return f"{near[0]}:{body}" if near and body else f"name:{text}"


def parse_patterns(entries: object, *, field: str = "patterns") -> tuple[Pattern, ...]:
    """Read a list of entries, in order, duplicates kept.

    Raises:
        OffloadConfigError: ``entries`` is not a list, tuple or set, or an entry is wrong.
    """
    if isinstance(entries, str) or not isinstance(entries, Sequence | set | frozenset):
        hint = f"; write [{entries!r}]" if isinstance(entries, str) else ""
        raise OffloadConfigError(f"{field} is {entries!r}; it must be a list of strings{hint}")
    ordered = sorted(entries, key=str) if isinstance(entries, set | frozenset) else entries
    return tuple(parse_pattern(e, index=i, field=field) for i, e in enumerate(ordered))


def split_patterns(patterns: Iterable[Pattern]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the bodies of the name patterns and of the class patterns; equal texts once."""
    unique = list({pattern.text: pattern for pattern in patterns}.values())
    names = tuple(p.body for p in unique if p.kind == "name")
    return names, tuple(p.body for p in unique if p.kind == "class")


def match_part(pattern: str, text: str) -> bool:
    """Whether a part of a name, or a class, matches a glob as a whole.

    One step for each character of the text: the places of the glob that are reached so far are
    bits of an integer (the Shift-And method of Baeza-Yates and Gonnet, 1992, with loops at stars).
    """
    if "*" not in pattern and "?" not in pattern:
        return pattern == text
    literal, accepted, anything, loops, end = _compile(pattern)
    if literal not in text:  # hundreds of thousands of names are asked, and most are far off
        return False
    reached = 1
    for char in text:
        reached = (reached & accepted.get(char, anything)) << 1 | reached & loops
        if not reached:
            return False
    return bool(reached >> end & 1)


@lru_cache(maxsize=4096)
def _compile(pattern: str) -> tuple[str, Mapping[str, int], int, int, int]:
    """Return the longest literal piece, and the automaton.

    That is the bits of the places that take each character, any other one, and stay; and the end.
    """
    literal = max(pattern.replace("?", "*").split("*"), key=len)
    items = pattern.replace("*", "")
    loops = place = 0
    for char in pattern:
        if char == "*":
            loops |= 1 << place
        else:
            place += 1
    anything = sum(1 << at for at, item in enumerate(items) if item == "?")
    accepted = {
        char: anything | sum(1 << at for at, item in enumerate(items) if item == char)
        for char in set(items)
    }
    return literal, accepted, anything, loops, len(items)


def match_name(pattern: str, name: str, *, star_spans: bool) -> bool:
    """Whether a whole dotted name matches a pattern.

    Args:
        pattern: For example ``layers.*.mlp``.
        name: For example ``layers.0.mlp``.
        star_spans: A lone ``*`` stands for one or more parts rather than exactly one.
    """
    parts, names = _split(pattern), name.split(".")
    if not star_spans:
        return len(parts) == len(names) and all(map(match_part, parts, names))
    return _match_spanning(parts, names)


def _match_spanning(parts: Sequence[str], names: Sequence[str]) -> bool:
    """Dynamic programme over the parts: ``reached[i]`` says that names[:i] is matched so far."""
    reached = [True] + [False] * len(names)
    for part in parts:
        following = [False] * (len(names) + 1)
        for i, name in enumerate(names, start=1):
            if part == "*":
                following[i] = reached[i - 1] or following[i - 1]
            else:
                following[i] = reached[i - 1] and match_part(part, name)
        reached = following
    return reached[-1]


def selects(pattern: str, name: str) -> bool:
    """Whether a pattern selects a module or anything above it, a lone ``*`` spanning parts."""
    names = name.split(".")
    return any(
        match_name(pattern, ".".join(names[:end]), star_spans=True)
        for end in range(1, len(names) + 1)
    )


@lru_cache(maxsize=4096)
def _split(pattern: str) -> tuple[str, ...]:
    return tuple(pattern.split("."))
