"""Words of messages that depend on a number."""

from __future__ import annotations


def counted(count: int, noun: str, plural: str | None = None) -> str:
    """Return a count with its noun: ``1 error``, ``0 errors``, ``1,024 matrices``.

    Args:
        count: How many.
        noun: What, for one.
        plural: What, for any other number; None: ``noun`` with an s.
    """
    return f"{count:,} {noun if count == 1 else plural or noun + 's'}"
