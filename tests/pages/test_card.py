"""The model card: what it says, that it is the same each time, and what strangers may put in it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from made_report import make_report

from modelopt_lite import quantize_and_export
from modelopt_lite.dialects.engines import ENGINES
from modelopt_lite.pages.card import base_model, front_matter, model_card
from modelopt_lite.pages.command import command_line
from modelopt_lite.recipes import load_recipe
from modelopt_lite.recipes.written import recipe_text
from modelopt_lite.report import CARD_FILE, Report

MakeCheckpoint = Callable[..., Path]
SOURCE_CARD = """---
license: apache-2.0
language: [en, de]
tags: [moe, nvfp4]
widget: [{text: hi}]
---
# The source
Words that stay with it.
"""


def split(card: str) -> tuple[dict[str, Any], str]:
    _, head, text = card.split("---\n", 2)
    front: dict[str, Any] = yaml.safe_load(head)
    return front, text


def card_of(report: Report, dialect: str = "modelopt", **source_card: Any) -> str:
    return model_card(report, dialect, source_card, 2_600_000)


def of_preset(name: str = "nvfp4", **changes: Any) -> Report:
    text = recipe_text(load_recipe(name))
    return make_report(recipe=name, recipe_text=text, **changes)


def test_beside_an_export(
    checkpoint: MakeCheckpoint, token_batches: list[torch.Tensor], tmp_path: Path
) -> None:
    source = checkpoint("llama")
    (source / CARD_FILE).write_text(SOURCE_CARD, encoding="utf-8")
    for out in ("a", "b"):
        quantize_and_export(
            source, export_dir=tmp_path / out, calib_data=token_batches, progress=False
        )
    front, text = split((tmp_path / "a" / CARD_FILE).read_text(encoding="utf-8"))
    assert front["license"] == "apache-2.0"
    assert front["language"] == ["en", "de"]
    assert front["tags"] == ["modelopt-lite", "quantized", "nvfp4", "moe"]
    assert "widget" not in front
    assert "--recipe nvfp4" in text
    assert str(tmp_path) not in text
    assert "8 sequences, 106 tokens of batches of token ids" in text
    assert (tmp_path / "a" / CARD_FILE).read_bytes() == (tmp_path / "b" / CARD_FILE).read_bytes()
    kept = tmp_path / "a" / "SOURCE_README.md"
    assert kept.read_text(encoding="utf-8") == SOURCE_CARD


def test_engines_are_those_of_the_table() -> None:
    for dialect, wanted in {
        "modelopt": ["yes", "yes", "yes", "no"],
        "compressed-tensors": ["yes", "not known", "not known", "no"],  # it joins experts
    }.items():
        rows = [row for row in card_of(of_preset(), dialect).splitlines() if row.startswith("| ")]
        told = {cells[1].strip(): cells[2].strip() for cells in (row.split("|") for row in rows)}
        assert [told[engine] for engine in ENGINES] == wanted, dialect
    assert "vllm serve" in card_of(of_preset())

    smoothed = of_preset()
    smoothed.beside = "scale"
    assert "knows no quant_algo NVFP4_AWQ" in card_of(smoothed)
    assert "serve" not in card_of(smoothed)


def test_base_model_on_a_hub() -> None:
    cached = "/root/.cache/huggingface/hub/models--org--Small-MoE/snapshots/abc123"
    report = of_preset()
    assert base_model(report) == "Small-MoE"
    report.details["source"] = cached
    front, text = split(card_of(report))
    assert front["base_model"] == "org/Small-MoE"
    assert front["base_model_relation"] == "quantized"
    assert "modelopt-lite quantize org/Small-MoE --recipe nvfp4" in text
    assert "--calib-size 64" in text


def test_a_name_of_several_lines_is_one_line() -> None:
    report = of_preset()
    report.details["source"] = "/models/a\n## Accuracy\n| x | <b> |"
    text = card_of(report)
    assert text.count("\n## Accuracy\n") == 1
    assert "<b>" not in text.split("## Made by")[0]


def test_a_changed_cache_is_in_the_command() -> None:
    report = of_preset()
    changed = load_recipe("nvfp4", kv_cache="fp8")
    report.recipe_text, report.details["recipe"] = recipe_text(changed), {"kv_cache": "fp8"}
    assert "--recipe nvfp4 --kv-cache fp8" in card_of(report)


def test_a_recipe_of_ones_own_is_in_the_card() -> None:
    text = card_of(make_report(recipe="mine", recipe_text="name: mine\nweights: fp8\n"))
    assert "--recipe mine.yaml" in text
    assert "```yaml\nname: mine\nweights: fp8\n```" in text


def test_accuracy_that_was_measured() -> None:
    rows = [{"on": "cpython", "perplexity": 4.9118, "kl": 0.0131, "tokens": 8687}]
    text = card_of(of_preset(accuracy=rows))
    assert "| measured on | perplexity | KL, nats a token | tokens |" in text
    assert "| cpython | 4.9118 | 0.01310 | 8,687 |" in text
    assert "Not measured" in card_of(of_preset())


@pytest.mark.parametrize(
    "text",
    [
        "no front matter",
        "---\n- a list\n---\n",
        "---\nlicense: !!python/object/apply:os.system [true]\n---\n",
        "---\n: : :\n---\n",
        "---\nlicense: mit\n",
        "---\na: &a [1]\nb: &b [*a, *a]\n" + "c: [" + "*b, " * 60_000 + "]\n---\n",
    ],
)
def test_malformed_cards_of_sources_say_nothing(text: str, tmp_path: Path) -> None:
    (tmp_path / CARD_FILE).write_text(text, encoding="utf-8")
    assert front_matter(tmp_path) == {}


def test_binary_cards_of_sources_say_nothing(tmp_path: Path) -> None:
    (tmp_path / CARD_FILE).write_bytes(b"---\n\xff\xfe\n---\n")
    assert front_matter(tmp_path) == {}


def test_names_make_no_cells_and_no_markup() -> None:
    reason = "the recipe\n| x | y |\n<script>"
    text = card_of(of_preset(excluded={"a": reason}))
    assert "<script>" not in text
    assert "| x |" not in text


def test_commands() -> None:
    defaults = {"recipe": "nvfp4", "seed": 0, "verify": True, "strict": False, "ep": None}
    given = {"recipe": "fp8", "seed": 0, "verify": False, "strict": True, "progress": False}
    words = "modelopt-lite quantize 'a b' --recipe fp8 --no-verify --strict"
    assert command_line("a b", given, defaults) == words
    assert command_line("c", {"dialect": ["a", "b"]}, {}).endswith("--dialect both")
