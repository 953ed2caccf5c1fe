"""Choose a format for each group so that the summed score is least within a number of bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from modelopt_lite.errors import InternalError, RecipeError

_SCALE = 1e6  # of the objective: the solver stops within 1e-6 of the least
_TRIES = 100


@dataclass(frozen=True, slots=True)
class Option:
    """A format that a group can have.

    Attributes:
        format: Its name.
        bytes: What the group takes in it.
        score: What it costs the model; not negative.
    """

    format: str
    bytes: int
    score: float


def choose(groups: Mapping[str, Sequence[Option]], limit: int) -> dict[str, str]:
    """Return the format of each group with the least sum of scores within ``limit`` bytes.

    A mixed-integer programme, solved by HiGHS to its optimum: of each group one option, all sizes
    together at most the limit.

    Raises:
        RecipeError: Even the smallest options are too large.
    """
    # A third of a second, which a run that searches no formats need not wait for.
    from scipy.optimize import Bounds, LinearConstraint, milp

    least = sum(min(option.bytes for option in options) for options in groups.values())
    if least > limit:
        raise RecipeError(f"the smallest choice takes {least:,} bytes, more than {limit:,}")
    columns = [(group, option) for group, options in groups.items() for option in options]
    scores = np.array([option.score for _, option in columns])
    total = sum(max(option.score for option in options) for options in groups.values())
    sizes = np.array([option.bytes for _, option in columns])
    step = np.gcd.reduce(sizes)  # small whole numbers, in which the solver's tolerance is nothing
    number = {group: row for row, group in enumerate(groups)}
    of_group = np.zeros((len(groups), len(columns)))
    of_group[[number[group] for group, _ in columns], np.arange(len(columns))] = 1
    rules = [
        LinearConstraint(of_group, 1, 1),
        LinearConstraint((sizes // step)[None], -np.inf, limit // step),
    ]
    for _ in range(_TRIES):
        solved = milp(
            scores / total * _SCALE if total else sizes / sizes.max(),
            integrality=np.ones(len(columns)),
            bounds=Bounds(0, 1),
            constraints=rules,
            options={"mip_rel_gap": 0.0},
        )
        if solved.x is None:
            raise InternalError(f"the choice of formats was not found: {solved.message}")
        taken = solved.x > 0.5
        if sizes[taken].sum() <= limit:
            found = (column for column, one in zip(columns, taken, strict=True) if one)
            return {group: option.format for group, option in found}
        # Too large by less than the solver's tolerance: any choice but this one.
        rules.append(LinearConstraint(taken[None].astype(float), -np.inf, len(groups) - 1))
    raise InternalError(f"no choice of formats was found within {limit:,} bytes")
