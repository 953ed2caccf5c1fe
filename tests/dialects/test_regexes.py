"""Expressions of strangers: as `re` has them, and in bounded time."""

from __future__ import annotations

import re
import time
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modelopt_lite.dialects import regexes
from modelopt_lite.dialects.regexes import RegexError, matches

ATOMS = st.sampled_from(
    [
        "a",
        "b",
        ".",
        r"\.",
        r"\d",
        r"\w",
        "[ab]",
        "[^a]",
        "[0-9a]",
        r"\b",
        "^",
        "$",
        "(?=a)",
        "(?!b)",
    ]
)


def grown(parts: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    suffix = st.sampled_from(["*", "+", "?", "{2}", "{1,3}", "{2,}", "*?"])
    return st.one_of(
        st.lists(parts, min_size=1, max_size=4).map("".join),
        st.lists(parts, min_size=2, max_size=3).map(lambda p: f"({'|'.join(p)})"),
        st.tuples(parts, suffix).map(lambda p: f"({p[0]}){p[1]}"),
    )


PATTERNS = st.recursive(ATOMS, grown, max_leaves=8)


@settings(deadline=None)
@given(PATTERNS, st.text("ab1._\n", max_size=12))
def test_it_matches_what_re_matches(pattern: str, text: str) -> None:
    wanted = re.match(pattern, text) is not None
    assert matches(pattern, text) == wanted
    with mock.patch.object(regexes, "_LONGEST_TEXT", -1):  # by the states alone
        assert matches(pattern, text) == wanted


@pytest.mark.parametrize(
    "pattern",
    ["(a+)+$", "(a|a)*$", "(.*)*x", ".*.*.*.*.*.*.*.*.*.*x", "(a?){40}a{40}$", "(?!(a+)+$)b"],
)
def test_no_expression_takes_long(pattern: str) -> None:
    started = time.process_time()
    assert not matches(pattern, "a" * 39 + "!")
    matches(pattern, "a" * 3000)
    assert time.process_time() - started < 5


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("(", "missing"),
        ("(a)\\1", "groupref"),
        ("(?<=a)b", "assert"),
        ("(?i)a", "flags"),
        ("(?i:a)", "flags"),
        ("a{100000}", "repeats more than"),
        ("(a{1000}){1000}", "states"),
        ("a" * 5000, "longer than"),
        ("(" * 2000 + ")" * 2000, ""),
    ],
)
def test_what_is_refused(pattern: str, message: str) -> None:
    with pytest.raises(RegexError, match=message):
        matches(pattern, "a")
