"""What the audit says about a checkpoint."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Severity = Literal["error", "warning"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One broken rule.

    Attributes:
        rule: Stable name of the rule, for example ``index-total-size``.
        message: File, tensor, value and remedy.
        severity: ``error``: an engine refuses the checkpoint or computes something else with it.
            ``warning``: it loads, and loses accuracy or was not checked in full.
    """

    rule: str
    message: str
    severity: Severity = "error"


def shorten(names: Iterable[str], limit: int = 4) -> str:
    """Return the first few names, and how many more there are."""
    listed = list(names)
    more = f" and {len(listed) - limit} more" if len(listed) > limit else ""
    return ", ".join(repr(name) for name in listed[:limit]) + more
