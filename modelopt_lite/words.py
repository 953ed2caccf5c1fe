"""Words of messages that depend on a number, a size, or on what was misspelt."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def counted(count: int, noun: str, plural: str | None = None) -> str:
    """Return a count with its noun: ``1 error``, ``0 errors``, ``1,024 matrices``.

    Args:
        count: How many.
        noun: What, for one.
        plural: What, for any other number; None: ``noun`` with an s.
    """
    return f"{count:,} {noun if count == 1 else plural or noun + 's'}"


def near(name: str, known: Iterable[str]) -> str:
    """Return ``; did you mean 'fp8'?`` for a name that is nearly a known one, else nothing."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def bytes_text(count: float) -> str:
    """Return a size with three digits and a unit of powers of 1000: ``8.31 MB``."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:,.3g} TB"


def printable(text: str) -> str:
    r"""Return a text that UTF-8 can hold: bytes of file names that are none become ``\udcff``.

    That is how JSON writes them, so that a JSON text stays the same value.
    """
    return text.encode("utf-8", "backslashreplace").decode("utf-8")
