"""The exact choice of tensors for a given assignment of labels to blocks, as an integer program.

Variables, by label: one binary for each level (no level: nothing is transferred), the start of its
compute and of its copy. By block: its size. And the time of a pass. Times of whole levels come from
the transfer curve, so that its bends cost nothing. A set of starts exists for a pass time exactly
where no circuit of the event graph exceeds it, so the least pass time is the simulator's.

With a budget: the least pass time, then the fewest bytes transferred. Without: the smallest peak
with no stall. Solved by HiGHS through scipy, one thread, with a limit on nodes and none on time,
so that the same problem gives the same answer.

Exact means: the optimum over all subsets of tensors, to ``GAP`` of the compute time, for the given
assignment, where the model's labels have at most ``BINARIES`` levels together. Beyond that, labels
keep the levels around those of a good choice found before, and none and all; and beyond
``BINARIES`` labels the program is left out, for it would find little in the time it takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from modelopt_lite.offload.simulate import NO_BLOCK
from modelopt_lite.offload.strategies.problem import MIB, Choice, Problem
from modelopt_lite.offload.strategies.quiet import quiet_solver

GAP = 1e-6
BINARIES = 64
_SECOND = 1e-6  # weight of the second objective: a whole model's bytes weigh 1e-6 of the compute
_COST = 1e3  # the solver stops at 1e-6 from the optimum, whatever the unit of cost
_NODES = 2000
_NODES_CUT = 40  # where levels had to be left out the last bit of proof is worth less
_LAPS = 3  # earlier users of a block that a copy looks at; all in small models
_SMALL = 8


def worthwhile(problem: Problem) -> bool:
    """Whether a program of the problem can be solved in reasonable time."""
    return 0 < len(problem.active) <= BINARIES


class _Rows:
    """A sparse matrix of rows with lower bounds."""

    def __init__(self) -> None:
        self.row: list[int] = []
        self.col: list[int] = []
        self.val: list[float] = []
        self.low: list[float] = []

    def at_least(self, low: float, terms: Sequence[tuple[int, float]]) -> None:
        """Require the sum of coefficient times column to be at least ``low``."""
        for col, val in terms:
            self.row.append(len(self.low))
            self.col.append(col)
            self.val.append(val)
        self.low.append(low)


class Program:
    """The integer program of one problem and one assignment."""

    def __init__(
        self,
        problem: Problem,
        blocks: Sequence[int],
        near: Choice | None = None,
        group_size: int = 1,
    ) -> None:
        """Build the program.

        Args:
            problem: The problem.
            blocks: Block of each label that may be offloaded; ``NO_BLOCK`` for the others.
            near: The choice whose levels are kept where not all can be.
            group_size: So many alike labels in a row take the same level.
        """
        self.problem, self.blocks = problem, blocks
        self.users = [i for i, b in enumerate(blocks) if b != NO_BLOCK]
        self.kept = self._kept_levels(near or problem.nothing())
        self.unit = problem.compute_ms or 1.0  # times are in passes, bytes in MiB
        full = sum(max(problem.copy_ms[i]) for i in self.users)
        self.longest = (problem.compute_ms + full) / self.unit
        self.columns = 1  # column 0 is the time of a pass
        self.rows = _Rows()
        self.level = self._level_columns(group_size)
        n = len(problem.labels)
        self.start = self._new(n)
        self.copy = dict(zip(self.users, self._new(len(self.users)), strict=True))
        ids = sorted({blocks[i] for i in self.users})
        self.size = dict(zip(ids, self._new(len(ids)), strict=True))
        self._order_rows()
        self._block_rows()
        self._memory_rows()

    def _new(self, count: int) -> list[int]:
        self.columns += count
        return list(range(self.columns - count, self.columns))

    def _kept_levels(self, near: Choice) -> dict[int, list[int]]:
        """Levels above 0 that the program looks at, by label."""
        tops = {i: len(self.problem.levels[i]) - 1 for i in self.users}
        self.complete = sum(tops.values()) <= BINARIES
        if self.complete:
            return {i: list(range(1, top + 1)) for i, top in tops.items()}
        room = max(BINARIES // len(self.users), 2)
        result = {}
        for i, top in tops.items():
            around = near.levels[i] or top // 2
            nearest = sorted(range(1, top), key=lambda k: (abs(k - around), k))[: room - 1]
            result[i] = sorted({*nearest, top})
        return result

    def _level_columns(self, group_size: int) -> dict[int, list[int]]:
        """Binaries by label; shared within a group of labels that have the same levels."""
        result: dict[int, list[int]] = {}
        for at, i in enumerate(self.users):
            before = self.users[at - 1] if at % group_size else None
            if before is not None and self._sizes(i) == self._sizes(before):
                result[i] = result[before]
                continue
            result[i] = self._new(len(self.kept[i]))
            self.rows.at_least(-1.0, [(c, -1.0) for c in result[i]])
        self.binaries = sorted({c for cols in result.values() for c in cols})
        return result

    def _sizes(self, i: int) -> list[float]:
        """Bytes of the levels looked at, in MiB."""
        return [self.problem.levels[i][k].size / MIB for k in self.kept[i]]

    def _sum(self, i: int, values: Sequence[float], sign: float = 1.0) -> list[tuple[int, float]]:
        """Terms for a label's value at the level taken."""
        return [(c, sign * v) for c, v in zip(self.level[i], values, strict=True)]

    def _copy_terms(self, i: int) -> list[tuple[int, float]]:
        return self._sum(i, [self.problem.copy_ms[i][k] / self.unit for k in self.kept[i]], -1.0)

    def _order_rows(self) -> None:
        """Computes follow each other and their copies; copies follow each other on the bus."""
        durations = [d / self.unit for d in self.problem.durations]
        for i, column in enumerate(self.start):
            wrap = [] if i else [(0, 1.0)]
            self.rows.at_least(durations[i - 1], [(column, 1.0), (self.start[i - 1], -1.0), *wrap])
        for at, i in enumerate(self.users):
            copy, before = self.copy[i], self.users[at - 1]
            self.rows.at_least(0.0, [(self.start[i], 1.0), (copy, -1.0), *self._copy_terms(i)])
            if len(self.users) > 1:
                wrap = [] if at else [(0, 1.0)]
                terms = [(copy, 1.0), (self.copy[before], -1.0), *self._copy_terms(before), *wrap]
                self.rows.at_least(0.0, terms)

    def _block_rows(self) -> None:
        """A copy waits for the computes that used its block, if both labels are offloaded."""
        durations = [d / self.unit for d in self.problem.durations]
        big = 3 * self.longest
        for block in self.size:
            chain = [i for i in self.users if self.blocks[i] == block]
            depth = len(chain) if len(self.users) <= _SMALL else min(_LAPS, len(chain))
            for at, i in enumerate(chain):
                for back in range(1, depth + 1):
                    use = chain[at - back]
                    wrap = [(0, 1.0)] if use >= i else []
                    terms = [(self.copy[i], 1.0), (self.start[use], -1.0), *wrap]
                    low = durations[use] - big
                    terms += self._sum(i, [-big] * len(self.level[i]))
                    # The farthest counts whether or not it is offloaded: that is on the safe side.
                    if use != i and (back < depth or depth == len(chain)):
                        terms += self._sum(use, [-big] * len(self.level[use]))
                        low -= big
                    self.rows.at_least(low, _merged(terms))

    def _memory_rows(self) -> None:
        """Blocks hold their labels; the budget holds blocks and residents."""
        for i in self.users:
            column = self.size[self.blocks[i]]
            self.rows.at_least(0.0, [(column, 1.0), *self._sum(i, self._sizes(i), -1.0)])
        if self.problem.budget is not None:
            saved = self._saved() + [(c, -1.0) for c in self.size.values()]
            need = (self.problem.total_bytes - self.problem.budget) / MIB
            self.rows.at_least(need, _merged(saved))

    def _saved(self) -> list[tuple[int, float]]:
        """Terms for the bytes transferred."""
        terms: list[tuple[int, float]] = []
        for i in self.users:
            terms += self._sum(i, self._sizes(i))
        return _merged(terms)

    def solve(self, better_than: Choice | None = None) -> Choice | None:
        """Return the optimum, or the best choice within the node limit.

        Args:
            better_than: Look only for choices that cost less than this one.

        Returns:
            None where there is no such choice.
        """
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import csr_array

        n, total = self.columns, max(self.problem.total_bytes / MIB, 1e-9)
        cost = self._cost(total)
        if better_than is not None and not self.problem.score(better_than).excess_bytes:
            limit = _COST * (self._value(better_than, total) - 1e-9)
            self.rows.at_least(-limit, [(c, -v) for c, v in enumerate(cost) if v])
        low, high = np.full(n, -2 * self.longest), np.full(n, 2 * self.longest)
        sizes = list(self.size.values())
        low[self.binaries], high[self.binaries] = 0.0, 1.0
        low[sizes], high[sizes] = 0.0, total
        low[0] = self.problem.compute_ms / self.unit
        if self.problem.budget is None:
            high[0] = low[0]
        low[self.start[0]] = high[self.start[0]] = 0.0
        integrality = np.zeros(n)
        integrality[self.binaries] = 1
        matrix = csr_array(
            (self.rows.val, (self.rows.row, self.rows.col)), shape=(len(self.rows.low), n)
        )
        nodes = _NODES if self.complete else _NODES_CUT
        with quiet_solver():
            answer: Any = milp(
                cost,
                integrality=integrality,
                bounds=Bounds(low, high),
                constraints=LinearConstraint(matrix, np.array(self.rows.low), np.inf),
                options={"node_limit": nodes, "mip_rel_gap": 0.0},
            )
        return None if answer.x is None else self._choice(answer.x)

    def _cost(self, total: float) -> Any:
        """Objective by column: see the file's docstring. ``total`` is the model's size in MiB."""
        cost = np.zeros(self.columns)
        cost[0] = 1.0
        weight = _SECOND / total
        if self.problem.budget is None:
            weight = -1.0 / total
            cost[list(self.size.values())] = -weight
        for column, value in self._saved():
            cost[column] += weight * value
        return _COST * cost

    def _value(self, choice: Choice, total: float) -> float:
        """What the objective is for a choice, whatever its blocks."""
        score, compute = self.problem.score(choice), self.problem.compute_ms / self.unit
        pass_time = compute + self.problem.stall_ms(choice) / self.unit
        if self.problem.budget is None:
            return pass_time + score.cost[0] / MIB / total - self.problem.total_bytes / MIB / total
        return pass_time + _SECOND * score.cost[0] / MIB / total

    def _choice(self, x: Any) -> Choice:
        levels, blocks = list(self.problem.nothing().levels), list(self.problem.nothing().blocks)
        for i in self.users:
            taken = [k for k, c in zip(self.kept[i], self.level[i], strict=True) if x[c] > 0.5]
            if taken:
                levels[i], blocks[i] = taken[0], self.blocks[i]
        return Choice(tuple(levels), tuple(blocks))


def _merged(terms: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """Add up coefficients of the same column: groups share columns."""
    total: dict[int, float] = {}
    for column, value in terms:
        total[column] = total.get(column, 0.0) + value
    return list(total.items())
