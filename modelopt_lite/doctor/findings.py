"""What the check of a spec says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "wrong", "absent", "not_checkable", "no_causal_lm"]


@dataclass(frozen=True, slots=True)
class Finding:
    """A field of a spec that the installed transformers contradicts.

    Attributes:
        field: Section and field, as ``moe_spec.block_names``.
        found: What the spec says and what is there.
        remedy: What to write instead.
    """

    field: str
    found: str
    remedy: str


@dataclass(frozen=True, slots=True)
class Checked:
    """The check of one spec.

    Attributes:
        model_type: Its type.
        status: "wrong" where there is a finding, "absent" where the installed release is older than
            the spec's, "not_checkable" where the code is not there, "no_causal_lm" for models that
            predict no next token.
        why: What was built, or why nothing was.
        findings: What is wrong.
        unproven: What could not be held to the model, and why.
        seconds: How long it took.
    """

    model_type: str
    status: Status
    why: str = ""
    findings: tuple[Finding, ...] = ()
    unproven: tuple[str, ...] = ()
    seconds: float = 0.0
