"""Match regular expressions of strangers' configs in bounded time.

`re` backtracks: ``(a+)+$`` takes hours on forty letters. What cannot do so goes to `re`; the rest
is run as a set of states over the text (K. Thompson, CACM 11(6), 1968), whose time is the product
of both lengths. Backward references and lookbehind, which no such machine has, are refused.
"""

from __future__ import annotations

import re
import re._constants as ops  # type: ignore[import-not-found]
import re._parser as parser  # type: ignore[import-not-found]
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

LONGEST = 4096
_LONGEST_TEXT = 256  # for `re`: with three unbounded repeats, under 3e6 steps
_REPEATS = 3
_STATES = 20_000
_CATEGORIES: dict[Any, Callable[[str], bool]] = {
    ops.CATEGORY_DIGIT: str.isdecimal,
    ops.CATEGORY_NOT_DIGIT: lambda c: not c.isdecimal(),
    ops.CATEGORY_SPACE: str.isspace,
    ops.CATEGORY_NOT_SPACE: lambda c: not c.isspace(),
    ops.CATEGORY_WORD: lambda c: c.isalnum() or c == "_",
    ops.CATEGORY_NOT_WORD: lambda c: not (c.isalnum() or c == "_"),
}


class RegexError(ValueError):
    """An expression that is malformed, too long, or of a kind that is refused."""


def matches(pattern: str, text: str) -> bool:
    """Return whether an expression matches the beginning of a text, as ``re.match`` does.

    Raises:
        RegexError: See there.
    """
    compiled = _compiled(pattern)
    if compiled.plain is not None and len(text) <= _LONGEST_TEXT:
        return compiled.plain.match(text) is not None
    return _Run(text).reaches_end(compiled.program, 0)


@dataclass(frozen=True, slots=True)
class _Compiled:
    """A program, and the expression of `re` where that cannot take long."""

    program: list[tuple[Any, ...]]
    plain: re.Pattern[str] | None


@lru_cache(maxsize=1024)
def _compiled(pattern: str) -> _Compiled:
    if len(pattern) > LONGEST:
        raise RegexError(f"is longer than {LONGEST} characters")
    try:
        tree = parser.parse(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise RegexError(str(error)) from error
    if tree.state.flags & ~re.UNICODE:
        raise RegexError("has flags, which are not read here")
    program: list[tuple[Any, ...]] = []
    try:
        _emit(tree, program)
    except RecursionError as error:
        raise RegexError("is nested too deep") from error
    program.append(("end",))
    harmless = _unbounded(tree, inside=False) <= _REPEATS
    return _Compiled(program, re.compile(pattern) if harmless else None)


def _unbounded(tree: Any, *, inside: bool) -> int:
    """Count the repeats that can make `re` backtrack; many where one is inside of another."""
    count = 0
    for op, value in tree:
        if op in (ops.MAX_REPEAT, ops.MIN_REPEAT):
            if inside or _unbounded(value[2], inside=True):
                return _REPEATS + 1
            count += 1
        elif op is ops.BRANCH:
            parts = [_unbounded(branch, inside=inside) for branch in value[1]]
            if inside:
                return _REPEATS + 1
            count += sum(parts)
        elif op is ops.SUBPATTERN:
            count += _unbounded(value[3], inside=inside)
        elif op in (ops.ASSERT, ops.ASSERT_NOT):
            count += _unbounded(value[1], inside=inside)
    return count


def _emit(tree: Any, program: list[tuple[Any, ...]]) -> None:
    """Append the states of an expression; each is ("one", test), ("fork", a, b) or ("at", …)."""
    for op, value in tree:
        if len(program) > _STATES:
            raise RegexError(f"has more than {_STATES} states")
        if op in (ops.LITERAL, ops.NOT_LITERAL, ops.ANY, ops.IN):
            program.append(("one", _test(op, value)))
        elif op is ops.SUBPATTERN:
            if value[1] or value[2]:
                raise RegexError("has flags, which are not read here")
            _emit(value[3], program)
        elif op is ops.BRANCH:
            _emit_branch(value[1], program)
        elif op in (ops.MAX_REPEAT, ops.MIN_REPEAT):
            _emit_repeat(value, program)
        elif op is ops.AT and value in _PLACES:
            program.append(("at", _PLACES[value]))
        elif op in (ops.ASSERT, ops.ASSERT_NOT) and value[0] > 0:
            inner: list[tuple[Any, ...]] = []
            _emit(value[1], inner)
            program.append(("look", op is ops.ASSERT, [*inner, ("end",)]))
        else:
            raise RegexError(f"holds {str(op).lower()}, which is not read here")


def _emit_branch(branches: list[Any], program: list[tuple[Any, ...]]) -> None:
    jumps = []
    for branch in branches[:-1]:
        fork = len(program)
        program.append(())
        _emit(branch, program)
        jumps.append(len(program))
        program.append(())
        program[fork] = ("fork", fork + 1, len(program))
    _emit(branches[-1], program)
    for jump in jumps:
        program[jump] = ("fork", len(program), len(program))


def _emit_repeat(value: tuple[int, Any, Any], program: list[tuple[Any, ...]]) -> None:
    least, most, body = value
    if least > _STATES or (most is not ops.MAXREPEAT and most > _STATES):
        raise RegexError(f"repeats more than {_STATES} times")
    for _ in range(least):
        _emit(body, program)
    if most is ops.MAXREPEAT:
        fork = len(program)
        program.append(())
        _emit(body, program)
        program.append(("fork", fork, fork))
        program[fork] = ("fork", fork + 1, len(program))
        return
    forks = []
    for _ in range(most - least):
        forks.append(len(program))
        program.append(())
        _emit(body, program)
    for fork in forks:
        program[fork] = ("fork", fork + 1, len(program))


def _test(op: Any, value: Any) -> Callable[[str], bool]:
    """Whether a character fits."""
    if op is ops.ANY:
        return lambda c: c != "\n"
    if op in (ops.LITERAL, ops.NOT_LITERAL):
        return lambda c: (ord(c) == value) == (op is ops.LITERAL)
    negated = bool(value) and value[0][0] is ops.NEGATE
    tests = [_member(kind, what) for kind, what in value if kind is not ops.NEGATE]
    return lambda c: any(test(c) for test in tests) != negated


def _member(kind: Any, what: Any) -> Callable[[str], bool]:
    if kind is ops.LITERAL:
        return lambda c: ord(c) == what
    if kind is ops.RANGE:
        return lambda c: what[0] <= ord(c) <= what[1]
    return _CATEGORIES[what]


def _boundary(text: str, at: int) -> bool:
    word = _CATEGORIES[ops.CATEGORY_WORD]
    return (at > 0 and word(text[at - 1])) != (at < len(text) and word(text[at]))


_PLACES: dict[Any, Callable[[str, int], bool]] = {
    ops.AT_BEGINNING: lambda text, at: at == 0,
    ops.AT_BEGINNING_STRING: lambda text, at: at == 0,
    ops.AT_END: lambda text, at: at == len(text) or (at == len(text) - 1 and text[at] == "\n"),
    ops.AT_END_STRING: lambda text, at: at == len(text),
    ops.AT_BOUNDARY: _boundary,
    ops.AT_NON_BOUNDARY: lambda text, at: not _boundary(text, at),
}


class _Run:
    """One text; what lookahead found is kept for each place."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._looked: dict[tuple[int, int], bool] = {}

    def reaches_end(self, program: list[tuple[Any, ...]], start: int) -> bool:
        """Return whether a program ends anywhere behind a place."""
        states = self._spread(program, [0], start)
        for at in range(start, len(self._text) + 1):
            if any(program[s][0] == "end" for s in states):
                return True
            if not states or at == len(self._text):
                return False
            c = self._text[at]
            moved = [s + 1 for s in states if program[s][0] == "one" and program[s][1](c)]
            states = self._spread(program, moved, at + 1)
        return False

    def _spread(self, program: list[tuple[Any, ...]], states: list[int], at: int) -> set[int]:
        """Follow all that takes no character."""
        seen: set[int] = set()
        left = list(states)
        while left:
            state = left.pop()
            if state in seen:
                continue
            seen.add(state)
            what = program[state]
            if what[0] == "fork":
                left += what[1:]
            elif (what[0] == "at" and what[1](self._text, at)) or (
                what[0] == "look" and self._look(what[2], at) == what[1]
            ):
                left.append(state + 1)
        return seen

    def _look(self, program: list[tuple[Any, ...]], at: int) -> bool:
        key = (id(program), at)
        if key not in self._looked:
            self._looked[key] = self.reaches_end(program, at)
        return self._looked[key]
