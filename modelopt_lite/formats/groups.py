"""Sizes of groups of codes that share a scale, where a recipe chooses them. Needs no torch."""

from __future__ import annotations

GROUP_MULTIPLE = 8
"""Of a size of groups: eight 4-bit codes fill a word."""


def fits_groups(size: int) -> bool:
    """Return whether groups of any size may have this one."""
    return size > 0 and size % GROUP_MULTIPLE == 0
