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


def bytes_unit(most: float) -> tuple[float, str]:
    """Return the largest unit that a size has one of, in bytes, and its name."""
    units = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
    return next(((size, name) for size, name in units if most >= size), (1.0, "B"))


def bytes_text(count: float) -> str:
    """Return a size with three digits and a unit of powers of 1000: ``8.31 MB``."""
    count = float(f"{count:.3g}")  # as it is shown: 999,900 bytes are 1 MB
    unit, name = bytes_unit(count)
    return f"{count / unit:{',.0f' if count >= 100 * unit else '.3g'}} {name}"


def printable(text: str) -> str:
    r"""Return a text that UTF-8 can hold: bytes of file names that are none become ``\udcff``.

    That is how JSON writes them, so that a JSON text stays the same value.
    """
    return text.encode("utf-8", "backslashreplace").decode("utf-8")
