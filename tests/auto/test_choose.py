"""The choice of formats against every choice there is."""

from __future__ import annotations

import math
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modelopt_lite.auto.choose import Option, choose
from modelopt_lite.errors import RecipeError

sizes = st.integers(1, 10**9)
scores = st.floats(0, 1e12, allow_subnormal=False)
options = st.lists(st.tuples(sizes, scores), min_size=1, max_size=4).map(
    lambda pairs: [Option(f"f{i}", size, score) for i, (size, score) in enumerate(pairs)]
)


def best(groups: list[list[Option]], limit: int) -> float:
    """The least sum of scores within the limit, by trying all."""
    fitting = (c for c in product(*groups) if sum(option.bytes for option in c) <= limit)
    return min(math.fsum(option.score for option in choice) for choice in fitting)


@settings(max_examples=60, deadline=None)
@given(st.lists(options, min_size=1, max_size=5), st.floats(0, 1))
def test_it_is_the_best_of_all(groups: list[list[Option]], share: float) -> None:
    least = sum(min(option.bytes for option in group) for group in groups)
    most = sum(max(option.bytes for option in group) for group in groups)
    limit = least + int(share * (most - least))
    named = {str(index): group for index, group in enumerate(groups)}
    formats = choose(named, limit)
    chosen = [next(o for o in named[name] if o.format == fmt) for name, fmt in formats.items()]
    assert len(chosen) == len(groups)
    assert sum(option.bytes for option in chosen) <= limit
    total = math.fsum(max(option.score for option in group) for group in groups)
    assert math.fsum(option.score for option in chosen) <= best(groups, limit) + 1e-9 * total


def test_a_byte_too_many_is_too_many() -> None:
    groups = {name: [Option("small", 10**9, 1.0), Option("large", 2 * 10**9, 0.0)] for name in "ab"}
    assert choose(groups, 4 * 10**9) == {"a": "large", "b": "large"}
    assert sorted(choose(groups, 4 * 10**9 - 1).values()) == ["large", "small"]


def test_without_scores_the_smallest_is_taken() -> None:
    groups = {"a": [Option("large", 2, 0.0), Option("small", 1, 0.0)]}
    assert choose(groups, 2) == {"a": "small"}


def test_no_choice_fits() -> None:
    with pytest.raises(RecipeError, match="takes 10 bytes, more than 9"):
        choose({"a": [Option("small", 10, 0.0)]}, 9)
