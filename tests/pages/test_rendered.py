"""The report as a person sees it, in headless Chromium; ``nox -s report`` runs it."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path

import pytest
from chromium import Browser, find

from modelopt_lite.pages.charts import COLD
from modelopt_lite.pages.report_page import write_page
from modelopt_lite.report import PAGE_FILE, Report

pytest.importorskip("matplotlib", reason="charts need matplotlib (nox -s report)")
PROGRAM = find()
pytestmark = pytest.mark.skipif(PROGRAM is None, reason="no Chromium (apt package chromium)")

CHARTS = ("sizes", "errors", "experts", "ranges", "timeline")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    assert PROGRAM is not None
    with Browser(PROGRAM) as started:
        yield started


@pytest.fixture
def shown(browser: Browser, report: Report, tmp_path: Path) -> Browser:
    write_page(report, tmp_path)
    browser.open(tmp_path / PAGE_FILE, width=1200)
    return browser


def test_everything_is_there_to_read(shown: Browser) -> None:
    text = shown.evaluate("document.body.innerText")
    for words in (
        "Small-MoE, nvfp4",
        "8 MB → 2.6 MB (32.5%)",
        "64 sequences, 32,768 tokens",
        "model.layers.3.mlp.experts.1.up_proj",
        "1 expert saw no calibration token",
        "cold: model.layers.0.mlp.experts.0",
        "budget of host memory",
        "router",
        "model.layers.*.mlp.gate",
        "modelopt-lite quantize /models/Small-MoE --recipe nvfp4",
    ):
        assert words in text, words


@pytest.mark.parametrize("width", [1200, 390])
def test_charts_are_drawn_and_fit(
    browser: Browser, report: Report, tmp_path: Path, width: int
) -> None:
    write_page(report, tmp_path)
    browser.open(tmp_path / PAGE_FILE, width=width)
    for name in CHARTS:
        left, wide, _ = _box(browser, f"#{name}")
        assert left >= 0
        assert left + wide <= width
        _, wide, high = _box(browser, f"#{name} svg")
        assert wide > 0.8 * min(width, 1100)
        assert wide >= 500, "its words are too small to read"
        assert high > 150
    # The page itself is never scrolled sideways; wide tables and charts scroll in their own box.
    assert browser.evaluate("document.documentElement.scrollWidth") <= width


def _box(browser: Browser, selector: str) -> list[float]:
    """Return left, width and height of an element."""
    found: list[float] = browser.evaluate(
        f"(b => [b.left, b.width, b.height])"
        f"(document.querySelector('{selector}').getBoundingClientRect())"
    )
    return found


@pytest.mark.parametrize("width", [1200, 390])
def test_words_are_whole(browser: Browser, report: Report, tmp_path: Path, width: int) -> None:
    """Heads of tables and rows have a line of their own; no column is a letter wide."""
    report.accuracy = [{"on": "a text", "perplexity": 4.0, "source_perplexity": 3.9, "kl": 0.1}]
    write_page(report, tmp_path)
    browser.open(tmp_path / PAGE_FILE, width=width)
    high = browser.evaluate(
        "Math.max(...[...document.querySelectorAll('th')].map(e => { "
        "const r = new Range(); r.selectNodeContents(e); return r.getBoundingClientRect().height"
        "}))"
    )
    line = browser.evaluate("parseFloat(getComputedStyle(document.body).lineHeight)")
    assert 10 < high < 1.5 * line
    narrow = browser.evaluate(
        "Math.min(...[...document.querySelectorAll('td')].filter(e => e.clientHeight)"
        ".map(e => e.clientWidth))"
    )
    assert narrow > 20


@pytest.mark.parametrize("most", [3, 60, 50_000])
def test_the_scale_of_tokens_has_marks(
    browser: Browser, report: Report, tmp_path: Path, most: int
) -> None:
    report.tokens_per_expert = {"model.layers.0.mlp.experts": [2, most]}
    write_page(report, tmp_path)
    browser.open(tmp_path / PAGE_FILE, width=1200)
    told = browser.evaluate(
        "[...document.querySelectorAll('#experts-axes_2 text')].map(e => e.textContent)"
    )
    assert sum(mark.replace(",", "").isdecimal() for mark in told) >= 2, told


def test_charts_show_what_they_are_about(shown: Browser) -> None:
    for name, words in {
        "sizes": ("source", "export", "layer"),
        "errors": ("relative error", "self_attn.q_proj"),
        "experts": ("expert", "tokens", "model.layers.0.mlp.experts"),
        "ranges": ("largest magnitude",),
        "timeline": (
            "GB in use",
            "MB, summed up",
            "budget of host memory, 2 GB",
            "read",
            "written",
        ),
    }.items():
        text = shown.evaluate(f"document.querySelector('#{name} svg').textContent")
        assert all(word in text for word in words), (name, text)
    assert shown.evaluate(
        "new Set([...document.querySelectorAll('[id]')].map(e => e.id)).size"
        " == document.querySelectorAll('[id]').length"
    )


def test_cold_experts_are_red_in_the_picture(shown: Browser) -> None:
    from PIL import Image

    box = shown.evaluate(
        "(b => [b.left + scrollX, b.top + scrollY, b.right + scrollX, b.bottom + scrollY])"
        "(document.querySelector('#experts svg').getBoundingClientRect())"
    )
    picture = Image.open(io.BytesIO(shown.picture())).convert("RGB").crop(tuple(map(int, box)))
    wanted = tuple(bytes.fromhex(COLD.removeprefix("#")))
    pixels = [picture.getpixel((x, y)) for x in range(picture.width) for y in range(picture.height)]
    red = sum(pixel == wanted for pixel in pixels)
    # One of 16 experts, whose cells fill more than half of the picture; a cross lies on it.
    assert 0.015 < red / len(pixels) < 1 / 16
    assert len(set(pixels)) > 8, "nothing else is drawn"


def test_nothing_is_loaded_and_nothing_runs(shown: Browser) -> None:
    """Not even what a name in the checkpoint asks for."""
    asked = [
        e["params"]["request"]["url"]
        for e in shown.events
        if "requestWillBeSent" in str(e.get("method"))
    ]
    assert [url for url in asked if not url.startswith(("file:", "data:"))] == []
    told = [
        e
        for e in shown.events
        if e.get("method")
        in {"Log.entryAdded", "Page.javascriptDialogOpening", "Runtime.exceptionThrown"}
    ]
    assert told == []
    assert shown.evaluate("document.scripts.length") == 0
    assert shown.evaluate("document.querySelectorAll('img').length") == 0
    assert "onerror" in shown.evaluate("document.body.innerText")
