"""Expressions of strangers: as `re` has them, and in bounded time."""

from __future__ import annotations

import re
import time
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modelopt_lite.dialects import regexes
from modelopt_lite.dialects.regexes import LONGEST, RegexError, matches

ATOMS = st.sampled_from(
    ["a", "b", ".", r"\.", r"\d", r"\w", "[ab]", "[^a]", "[0-9a]", r"\b", "^", "$", "(?=a)"]
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
    assert matches(pattern, text) == (re.match(pattern, text) is not None)


@pytest.mark.parametrize(
    "pattern",
    [r"(a+)+$", r"(a|a)*$", r"(.*)*x", r"(a?){40}a{40}$", r"(?!(a+)+$)b", r"(x+x+)+y|(a+a+)+b"],
)
def test_no_expression_takes_long(pattern: str) -> None:
    started = time.process_time()
    with suppress(RegexError):
        matches(pattern, "a" * 3000 + "!")
    assert time.process_time() - started < 3


def test_what_took_too_long_is_refused_from_then_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(regexes, "_SECONDS", 0.01)
    pattern = r"(a+a+)+b"
    with pytest.raises(RegexError, match="takes more than"):
        matches(pattern, "a" * 5000 + "!")
    with pytest.raises(RegexError, match="takes more than"):
        matches(pattern, "b")


@pytest.mark.parametrize("pattern", ["(", "[", "a{2,1}", "(?P<a", "a" * (LONGEST + 1)])
def test_malformed_ones_are_refused(pattern: str) -> None:
    with pytest.raises(RegexError):
        matches(pattern, "a")
