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
        engines: Those that it concerns, as ``--engine`` takes them; None: those of its rule, which
            `audit` fills in.
        decisive: A warning only because other engines load the export; to these it is an error.
    """

    rule: str
    message: str
    severity: Severity = "error"
    engines: tuple[str, ...] | None = None
    decisive: bool = False


def shorten(names: Iterable[str], limit: int = 4) -> str:
    """Return the first few names, and how many more there are."""
    listed = list(names)
    more = f" and {len(listed) - limit} more" if len(listed) > limit else ""
    return ", ".join(repr(name) for name in listed[:limit]) + more
