"""``report.html`` without a browser: what is in it, with charts and without, and what it costs."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from made_report import HOSTILE

from modelopt_lite import quantize_and_export
from modelopt_lite.pages import charts
from modelopt_lite.pages.layers import REST, Place, by_kind, by_reason, layer_bytes, place_of
from modelopt_lite.pages.report_page import report_page
from modelopt_lite.report import PAGE_FILE, Report

MakeCheckpoint = Callable[..., Path]
VOID = {"meta", "img", "br", "hr", "link", "input"}


class Balanced(HTMLParser):
    """Notes texts and attributes, and fails where elements do not close as they opened."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.addresses: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.addresses += [str(v) for k, v in attrs if k in {"src", "href", "xlink:href"}]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def parsed(page: str) -> Balanced:
    parser = Balanced()
    parser.feed(page)
    parser.close()
    assert parser.open == []
    return parser


@pytest.fixture(params=["charts", "tables"])
def with_charts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    if request.param == "charts":
        pytest.importorskip("matplotlib", reason="charts need matplotlib (nox -s report)")
        return True
    monkeypatch.setattr(charts, "available", lambda: False)
    return False


def test_sections_and_texts(report: Report, with_charts: bool) -> None:
    page = parsed(report_page(report))
    for words in ("Summary", "Sizes", "Errors of weights", "Tokens per expert", "To do it again"):
        assert words in page.text
    assert "the recipe excludes it" in page.text
    assert ("svg" in page.tags) == with_charts
    assert ("modelopt-lite[report]" in page.text) != with_charts


def test_nothing_is_loaded(report: Report, with_charts: bool) -> None:
    page = parsed(report_page(report))
    assert page.tags.isdisjoint({"img", "script", "link", "iframe", "object"})
    assert [a for a in page.addresses if not a.startswith(("#", "data:"))] == []
    assert HOSTILE in page.text


def test_the_same_values_give_the_same_page(report: Report, with_charts: bool) -> None:
    assert report_page(report) == report_page(report)


def test_matplotlib_that_cannot_be_imported(
    report: Report, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_svg", None)
    assert not charts.available()
    assert "svg" not in parsed(report_page(report)).tags


def test_a_chart_that_fails_is_told_of(report: Report, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any, **options: Any) -> str:
        raise ValueError("no font")

    monkeypatch.setattr(charts, "available", lambda: True)
    monkeypatch.setattr(charts, "draw", broken)
    page = parsed(report_page(report))
    assert "A chart could not be drawn: ValueError: no font" in page.text
    assert "model.layers.3.mlp.experts" in page.text


def test_the_summary_says_how_good_it_is(report: Report) -> None:
    text = parsed(report_page(report)).text
    assert "median 0.0955 (20.4 dB), worst 0.1010 (19.9 dB) (model.layers.3.mlp.experts.1" in text
    assert "all within the bounds of their formats" in text
    assert "16 experts, 1 COLD; 0 to 300 tokens" in text
    report.beyond_bound = ["lm_head"]
    assert "1 matrix BEYOND the bound" in parsed(report_page(report)).text


def test_how_far_perplexity_is_from_the_sources(report: Report) -> None:
    report.accuracy = [{"on": "a", "perplexity": 4.2, "source_perplexity": 4.0}]
    assert "+5.00%" in parsed(report_page(report)).text
    report.accuracy = [{"on": "a", "perplexity": 4.2}]
    assert "change" not in parsed(report_page(report)).text


def test_each_of_several_processes_is_told_of(report: Report) -> None:
    assert "process 0" not in parsed(report_page(report)).text
    used = {"bytes_read": 5_000_000, "peak_weight_bytes": 1_200_000, "peak_memory_bytes": 3 * 10**9}
    report.ranks = [used, {**used, "bytes_read": 4_900_000}]
    text = parsed(report_page(report)).text
    for words in ("2; the same bytes come of one", "4.9 MB", "1.2 MB", "3 GB"):
        assert words in text, words


def test_a_model_in_memory_was_calibrated_by_its_author(report: Report) -> None:
    report.details |= {"calibration": None, "options": {"in_memory": True}}
    assert "by a loop of the author's" in parsed(report_page(report)).text


def test_an_empty_report_is_a_page() -> None:
    page = parsed(report_page(Report("/out", "fp8", "llama")))
    assert "Not measured" in page.text


def test_a_large_model_is_a_small_page() -> None:
    """Of 60 layers of 384 experts: 69,000 matrices, in a second and a megabyte."""
    names = [
        f"model.layers.{n}.mlp.experts.{e}.{kind}_proj"
        for n in range(60)
        for e in range(384)
        for kind in ("gate", "up", "down")
    ]
    report = Report(
        "/out",
        "nvfp4",
        "deepseek_v3",
        quantized=dict.fromkeys(names, "nvfp4"),
        relative_errors=dict.fromkeys(names, 0.09),
        input_amax={f"model.layers.{n}.mlp.experts[gate_proj+up_proj]": 3.0 for n in range(60)},
        excluded={f"model.layers.{n}.mlp.gate": "router" for n in range(60)},
        tokens_per_expert={f"model.layers.{n}.mlp.experts": [0] * 384 for n in range(60)},
        cold_experts=[f"model.layers.{n}.mlp.experts.{e}" for n in range(60) for e in range(384)],
        details={"source": "/big"},
    )
    started = time.process_time()
    text = report_page(report)
    assert time.process_time() - started < 10
    assert len(text) < 1_000_000
    assert "60 modules" in text


def test_beside_a_real_export(
    checkpoint: MakeCheckpoint, token_batches: list[torch.Tensor], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    report = quantize_and_export(
        checkpoint("qwen3_moe"), export_dir=out, calib_data=token_batches, progress=False
    )
    page = parsed((out / PAGE_FILE).read_text(encoding="utf-8"))
    assert report.command in page.text
    assert "# calibration.safetensors: calib_data was given in memory, as list" in page.text
    assert len(report.timeline["seconds"]) > 2
    assert report.timeline["read"][-1] >= report.source_bytes
    assert report.timeline["written"][-1] >= report.export_bytes
    assert sum(both[0] for both in report.layer_bytes.values()) == report.source_bytes
    assert sum(both[1] for both in report.layer_bytes.values()) == report.export_bytes
    assert report.cold_experts == [] or report.cold_experts[0] in page.text


# --- sorting


def test_places() -> None:
    assert place_of("model.layers.3.mlp.experts.7.up_proj") == Place(
        "model.layers", 3, "mlp.experts.up_proj"
    )
    assert place_of("lm_head").layer == REST
    assert place_of("model.visual.blocks.11.attn").layer == "model.visual.blocks.11"
    assert place_of(f"model.layers.{'9' * 5000}.x").layer == REST
    assert place_of("7.x").layer == REST  # a number alone is no stack of layers


def test_kinds_beyond_the_most_are_put_together() -> None:
    values = {f"m.layers.0.k{n}": float(n) for n in range(5)}
    values |= {f"m.layers.{n}.k0": 10.0 for n in range(3)}
    found = by_kind(values, 3)
    assert set(found) == {"k0", "k1", "other"}
    assert found["k0"] == {("m.layers", 0): 10.0, ("m.layers", 1): 10.0, ("m.layers", 2): 10.0}
    assert found["other"] == {("m.layers", 0): 4.0}


def test_reasons_join_what_differs_in_numbers() -> None:
    excluded = {"l.0.gate": "router", "l.1.gate": "router", "head": "output head"}
    found = by_reason(excluded)
    assert found == {"router": {"l.*.gate": 2}, "output head": {"head": 1}}
    assert list(found) == ["output head", "router"]  # whatever comes first in a release's model


def test_layers_are_in_their_order() -> None:
    before = [("head", 1), ("l.10.w", 2), ("l.2.w", 3)]
    found = layer_bytes(before, [("l.2.w", 1), ("l.2.w_scale", 1), ("head", 1)])
    assert found == {"l.2": [3, 2], "l.10": [2, 0], REST: [1, 1]}
    assert [*found] == ["l.2", "l.10", REST]
