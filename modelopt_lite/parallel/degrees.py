"""How many ranks share the experts of a layer, and which expert is whose.

The ranks of a run form groups of ``ep`` in a row. Within a group each expert lies on one rank; the
``edp`` groups hold the same experts and see different batches.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

from modelopt_lite.errors import RecipeError
from modelopt_lite.words import counted


@dataclass(frozen=True, slots=True)
class Degrees:
    """The degrees of one run; ``ep * edp`` is the number of ranks.

    Attributes:
        ep: Ranks that share the experts of a layer (expert parallel).
        edp: Groups of such ranks (expert data parallel).
    """

    ep: int
    edp: int

    @property
    def world_size(self) -> int:
        """How many ranks there are."""
        return self.ep * self.edp

    def experts_of(self, rank: int, count: int) -> range:
        """Return which of a layer's ``count`` experts lie on a rank."""
        share = count // self.ep
        start = rank % self.ep * share
        return range(start, start + share)

    def owner(self, expert: int, count: int, rank: int) -> int:
        """Return the rank to which ``rank`` sends what it has for an expert: one of its group."""
        return rank // self.ep * self.ep + expert // (count // self.ep)

    def writes(self, rank: int) -> bool:
        """Whether a rank writes its experts; of those that hold the same ones, the first does."""
        return rank < self.ep

    def batches_of(self, rank: int, count: int) -> range:
        """Return which of a run's ``count`` batches a rank sends through the model."""
        return range(rank, count, self.world_size)


def choose_degrees(world_size: int, experts: int, ep: int | None = None) -> Degrees:
    """Choose the degrees of a run.

    Args:
        world_size: The number of ranks.
        experts: Routed experts of a layer; 0 for a dense model, whose ranks only share the batches.
        ep: What the user asks for; None for the largest number that divides both.

    Raises:
        RecipeError: A number of ranks below one, or an ``ep`` that does not divide both.
    """
    if world_size < 1:
        raise RecipeError(f"world_size is {world_size}; give the number of processes, 1 or more")
    most = gcd(world_size, experts) if experts else 1
    if ep is None:
        return Degrees(most, world_size // most)
    if ep < 1 or most % ep:
        allowed = ", ".join(str(d) for d in range(1, most + 1) if most % d == 0)
        has = counted(experts, "expert") if experts else "no routed experts"
        raise RecipeError(
            f"ep is {ep}, which does not divide both the number of ranks ({world_size}) and the "
            f"experts of a layer ({has}); here it can be {allowed}"
        )
    return Degrees(ep, world_size // ep)
