from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from modelopt_lite.offload.strategies import (
    AssignmentStrategy,
    OptimizedRoundRobinAssignment,
    StrictRoundRobinAssignment,
)

DATA: dict[str, Any] = json.loads(
    (Path(__file__).parent.parent / "data" / "offload" / "strategies.json").read_text()
)


@pytest.mark.parametrize(("sizes", "n_blocks", "assignment", "expected"), DATA["assignments"])
def test_assignment_vectors(
    sizes: list[int], n_blocks: int, assignment: str, expected: list[int]
) -> None:
    assigners: dict[str, AssignmentStrategy] = {
        "Strict": StrictRoundRobinAssignment(),
        "Optimized(2,4)": OptimizedRoundRobinAssignment(2, 4),
        "Optimized(3,4)": OptimizedRoundRobinAssignment(),
    }
    assert assigners[assignment].assign(sizes, n_blocks) == expected


def test_assignment_edges() -> None:
    optimized = OptimizedRoundRobinAssignment(1, 4)
    assert optimized.assign([], 4) == []
    assert optimized.assign([0, 0], 2) == [0, 1]
    assert optimized.assign([3, 3, 3], 1) == [0, 0, 0]
    many = optimized.assign([5] * 40, 4)
    assert all(a != b for a, b in itertools.pairwise(many))
    for bad in ((0, 4), (5, 4)):
        with pytest.raises(ValueError, match="min_blocks"):
            OptimizedRoundRobinAssignment(*bad)
    with pytest.raises(ValueError, match="n_blocks"):
        StrictRoundRobinAssignment().assign([1], 0)
    with pytest.raises(ValueError, match="distribution_weight"):
        OptimizedRoundRobinAssignment(distribution_weight=2)
