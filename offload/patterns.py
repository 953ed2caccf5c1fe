"""Match dotted names against patterns: one linear pass, no backtracking, no regular expressions.

A pattern is a sequence of parts separated by dots. Within a part, ``*`` stands for any characters
and ``?`` for one. A part that is ``*`` alone stands for exactly one part of the name where a
pattern includes, and for one or more where it excludes (or selects in a recipe).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache


def match_part(pattern: str, text: str) -> bool:
    """Whether a part of a name matches a part of a pattern (``*`` and ``?``).

    Greedy with one remembered star, so the cost is at most ``len(pattern) * len(text)``.
    """
    p = t = 0
    star, resume = -1, 0
    while t < len(text):
        if p < len(pattern) and pattern[p] in ("?", text[t]) and pattern[p] != "*":
            p, t = p + 1, t + 1
        elif p < len(pattern) and pattern[p] == "*":
            star, resume = p, t
            p += 1
        elif star >= 0:
            resume += 1
            p, t = star + 1, resume
        else:
            return False
    return all(char == "*" for char in pattern[p:])


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
