"""Pattern matching against a regular expression, and its cost on hard cases."""

from __future__ import annotations

import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from modelopt_lite.offload.patterns import match_name, match_part, selects

PARTS = st.text("ab0_*?[", max_size=6)
TEXTS = st.text("ab0_[", max_size=8)
PATTERNS = st.lists(st.text("ab*?", max_size=3) | st.just("*"), min_size=1, max_size=5)
NAMES = st.lists(st.text("ab", max_size=3), min_size=1, max_size=6)


def part_regex(pattern: str, any_char: str = ".") -> str:
    """Regular expression of one part; it may backtrack without end, which is why it stays here."""
    signs = {"*": f"{any_char}*", "?": any_char}
    return "".join(signs.get(char, re.escape(char)) for char in pattern)


def name_regex(pattern: str, *, star_spans: bool) -> str:
    """Regular expression of a dotted pattern."""
    star = r"[^.]*(?:\.[^.]*)*" if star_spans else "[^.]*"
    parts = [star if part == "*" else part_regex(part, "[^.]") for part in pattern.split(".")]
    return r"\.".join(parts)


@given(PARTS, TEXTS)
def test_part(pattern: str, text: str) -> None:
    expected = re.fullmatch(part_regex(pattern), text, re.DOTALL) is not None
    assert match_part(pattern, text) == expected


@given(PATTERNS, NAMES)
def test_name(pattern_parts: list[str], name_parts: list[str]) -> None:
    pattern, name = ".".join(pattern_parts), ".".join(name_parts)
    for spans in (False, True):
        expected = re.fullmatch(name_regex(pattern, star_spans=spans), name) is not None
        assert match_name(pattern, name, star_spans=spans) == expected, spans


@given(PATTERNS, NAMES)
def test_selects_is_a_match_of_any_beginning(
    pattern_parts: list[str], name_parts: list[str]
) -> None:
    pattern, name = ".".join(pattern_parts), ".".join(name_parts)
    regex = rf"(?:{name_regex(pattern, star_spans=True)})(?:\..*)?"
    assert selects(pattern, name) == (re.fullmatch(regex, name) is not None)


@given(st.lists(st.text("ab", max_size=3), min_size=1, max_size=6), NAMES)
def test_a_pattern_without_signs_matches_itself_alone(one: list[str], other: list[str]) -> None:
    for spans in (False, True):
        assert match_name(".".join(one), ".".join(other), star_spans=spans) == (one == other)


@pytest.mark.parametrize(
    ("pattern", "name", "one_part", "spanning"),
    [
        ("*", "a", True, True),
        ("*", "a.b.c", False, True),
        ("layers.*.mlp", "layers.0.mlp", True, True),
        ("layers.*.mlp", "layers.0.x.mlp", False, True),
        ("layers.*.mlp", "layers.mlp", False, False),  # at least one part
        ("layers.1*", "layers.10", True, True),
        ("layers.1*", "layers.10.mlp", False, False),  # not alone: within one part
        ("*.*", "a", False, False),
        ("**", "a.b", False, False),  # two stars are no lone star
        ("layers.?.mlp", "layers.12.mlp", False, False),
        ("Layers", "layers", False, False),
        ("a.[bc]", "a.b", False, False),  # brackets mean themselves
    ],
)
def test_examples(pattern: str, name: str, one_part: bool, spanning: bool) -> None:
    assert match_name(pattern, name, star_spans=False) == one_part
    assert match_name(pattern, name, star_spans=True) == spanning


def test_selects_everything_below() -> None:
    assert selects("*.mlp", "model.layers.0.mlp.gate_proj")
    assert selects("model", "model.layers.0.mlp.gate_proj")
    assert not selects("mlp", "model.layers.0.mlp.gate_proj")
    assert not selects("*.mlp", "mlp.gate_proj")


def seconds(pattern: str, name: str) -> float:
    best = float("inf")
    for _ in range(3):
        start = time.perf_counter()
        assert not match_name(pattern, name, star_spans=True)
        best = min(best, time.perf_counter() - start)
    return best


@pytest.mark.parametrize(
    ("pattern", "piece"),
    [("*a" * 20 + "b", "a"), ("*.a." * 20 + "b", "a."), ("*" * 40 + "b", "a"), ("?*" * 20, "b.")],
)
def test_cost_grows_no_faster_than_the_name(pattern: str, piece: str) -> None:
    """A regular expression needs ages for these; ten times the name may cost ten times the time."""
    name = piece * 200 + "c"
    if pattern.startswith("?"):
        pattern += ".x"
    assert seconds(pattern, piece * 2000 + "c") < 40 * seconds(pattern, name) + 0.05
