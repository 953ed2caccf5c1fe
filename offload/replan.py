"""Planning again in INFERENCE, with timings of the units as they run there (compiled, say)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

WARM_PASSES = 3  # not timed: compilers and caches settle

ReplanState = Literal["idle", "in_progress", "done", "failed"]


@dataclass(frozen=True, slots=True)
class StrategyReplanStatus:
    """Where a replan is.

    ``applied`` is None until one has ended, and then whether the plan is the new one. It can be
    requested as often as wanted, as the true weights are always at hand.
    """

    state: ReplanState
    can_request: bool
    applied: bool | None


@dataclass(slots=True)
class Replan:
    """The passes that a replan still has to see, and what was timed in them.

    Attributes:
        left: Passes to go.
        timed: So many of them, the last ones, are timed.
        manual: Only `update_state` called by the user counts passes.
        samples: Milliseconds by label.
        state: See `StrategyReplanStatus`.
    """

    left: int = 0
    timed: int = 0
    manual: bool = False
    samples: dict[str, list[float]] = field(default_factory=dict)
    state: ReplanState = "idle"

    @classmethod
    def begin(cls, timed: int, *, manual: bool) -> Replan:
        """Ask for so many timed passes, after some that are not."""
        return cls(WARM_PASSES + timed, timed, manual, {}, "in_progress")

    @property
    def timing(self) -> bool:
        """Whether the pass that runs is to be timed."""
        return 0 < self.left <= self.timed

    def record(self, label: str, ms: float) -> None:
        """Add one timing sample."""
        self.samples.setdefault(label, []).append(ms)

    def count(self) -> bool:
        """Count a pass; return whether it was the last."""
        self.left -= 1
        return self.left == 0

    def end(self, *, applied: bool) -> None:
        """Note how it ended."""
        self.left, self.state = 0, "done" if applied else "failed"

    def status(self, *, can_request: bool) -> StrategyReplanStatus:
        """Return what users see."""
        ended = {"done": True, "failed": False}
        return StrategyReplanStatus(
            self.state, can_request and not self.left, ended.get(self.state)
        )
