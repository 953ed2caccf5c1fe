"""Match regular expressions of strangers' configs in bounded time.

`re` backtracks without end: ``(a+)+$`` takes hours on forty letters. The package ``regex``, which
reads the same expressions, can be told when to stop.
"""

from __future__ import annotations

from functools import lru_cache

import regex

LONGEST = 4096
_SECONDS = 1.0  # others take microseconds


class RegexError(ValueError):
    """An expression that is malformed, too long, or takes too long."""


def matches(pattern: str, text: str) -> bool:
    """Return whether an expression matches the beginning of a text, as ``re.match`` does.

    Raises:
        RegexError: See there; an expression that took too long once is refused at once later.
    """
    return _compiled(pattern).matches(text)


class _Expression:
    def __init__(self, pattern: str) -> None:
        self._reason: str | None = None
        if len(pattern) > LONGEST:
            raise RegexError(f"is longer than {LONGEST} characters")
        try:
            self._compiled = regex.compile(pattern)
        except (regex.error, RecursionError, OverflowError, MemoryError) as error:
            raise RegexError(str(error) or type(error).__name__) from error

    def matches(self, text: str) -> bool:
        if self._reason is None:
            try:
                return self._compiled.match(text, timeout=_SECONDS) is not None
            except TimeoutError:
                self._reason = f"takes more than {_SECONDS:g} s to match"
        raise RegexError(self._reason)


_compiled = lru_cache(maxsize=1024)(_Expression)
