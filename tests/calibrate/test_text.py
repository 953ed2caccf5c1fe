"""The default text: its two shares, its fingerprint, and what importing it costs."""

from __future__ import annotations

import hashlib
import platform
import subprocess
import sys
from collections.abc import Iterator
from types import ModuleType

import pytest

from modelopt_lite.calibrate import text
from modelopt_lite.errors import CalibrationError


@pytest.fixture
def own_topics(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """Put a dictionary of the test's own in the place of the interpreter's topics."""
    module = ModuleType("pydoc_data.topics")
    topics: dict[str, str] = {}
    module.__dict__["topics"] = topics
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", module)
    text._shares.cache_clear()
    yield topics
    text._shares.cache_clear()


def test_no_paragraph_is_in_both_shares() -> None:
    shares = (text.calibration_text(), text.evaluation_text())
    calibration, evaluation = ({p.strip() for p in s.split(text.SEPARATOR)} for s in shares)
    assert calibration.isdisjoint(evaluation)
    assert len(shares[0]) > 2 * len(shares[1]) > 100_000


def test_sorted_topics_are_cut_at_four_fifths(own_topics: dict[str, str]) -> None:
    own_topics.update({name: f"about {name}\n" for name in "gecabdf"})  # 7 * 4 // 5 == 5
    assert text.calibration_text() == text.SEPARATOR.join(f"about {name}\n" for name in "abcde")
    assert text.evaluation_text() == "about f\n\n\nabout g\n"


def test_quoted_paragraph_stays_out_of_the_evaluation_share(own_topics: dict[str, str]) -> None:
    own_topics.update(a="one\n\ntwo\n", b="b\n", c="c\n", d="d\n", e="own words\n\ntwo\n\none\n")
    assert text.evaluation_text() == "own words"


def test_fingerprint_names_text_and_python() -> None:
    both = text.calibration_text() + "\0" + text.evaluation_text()
    digest = hashlib.sha256(both.encode()).hexdigest()
    assert text.text_fingerprint() == f"sha256:{digest}/python:{platform.python_version()}"


def test_fingerprint_follows_the_text(own_topics: dict[str, str]) -> None:
    own_topics.update({name: name for name in "abcde"})
    before = text.text_fingerprint()
    own_topics["e"] = "changed"
    text._shares.cache_clear()
    assert text.text_fingerprint() != before


def test_another_process_sees_the_same_text_and_loads_no_torch() -> None:
    code = (
        "import runpy, sys; module = runpy.run_path(sys.argv[1])\n"
        "print(module['text_fingerprint'](), 'torch' in sys.modules, 'transformers' in sys.modules)"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code, text.__file__], capture_output=True, text=True, check=True
    )
    assert ran.stdout.split() == [text.text_fingerprint(), "False", "False"]


def test_python_without_its_topics_is_told_what_to_do(
    own_topics: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    with pytest.raises(CalibrationError, match=r"pydoc_data\.topics; pass a text file as calib"):
        text.calibration_text()
