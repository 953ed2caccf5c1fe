"""Recipes that select by class and ask for inputs: what they choose, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from modelopt_lite import cli, dry_run
from modelopt_lite.errors import RecipeError
from modelopt_lite.formats.inputs import INPUTS
from modelopt_lite.formats.linear import FORMATS, with_inputs
from modelopt_lite.recipes import Override, Recipe, load_recipe, parse_recipe

MakeCheckpoint = Callable[..., Path]


def formats(plan: dict[str, Any]) -> dict[str, str]:
    return {name: m.get("format") or "none" for name, m in plan["linears"].items()}


def recipe(**fields: Any) -> Recipe:
    return Recipe(**{"name": "mine", "weights": "w4a16_nvfp4", **fields})


def test_classes_select_what_is_below_them(checkpoint: MakeCheckpoint) -> None:
    source = checkpoint("qwen3_moe")
    by_class = recipe(
        include=("class:*Attention", "class:Qwen3MoeSparseMoeBlock"),
        exclude=("name:*.layers.1.self_attn",),
        overrides=(Override(modules=("class:*Experts",), weights="mxfp8"),),
    )
    by_name = recipe(
        include=("*.self_attn", "*.mlp"),
        exclude=("*.layers.1.self_attn",),
        overrides=(Override(modules=("*.experts",), weights="mxfp8"),),
    )
    plans = [dry_run(source, recipe=made) for made in (by_class, by_name)]
    assert formats(plans[0]) == formats(plans[1])
    assert {"w4a16_nvfp4", "mxfp8", "none"} <= set(formats(plans[0]).values())
    said = [any("selects by class" in note for note in plan["notes"]) for plan in plans]
    assert said == [True, False]


def test_a_class_by_its_full_name(checkpoint: MakeCheckpoint) -> None:
    source = checkpoint("llama")
    found = formats(dry_run(source, recipe=recipe(exclude=("class:*.modeling_llama.LlamaMLP",))))
    left = {name for name, fmt in found.items() if fmt == "none"}
    assert {name.split(".")[-2] for name in left if "layers" in name} == {"mlp"}


def test_a_class_that_no_module_has(checkpoint: MakeCheckpoint) -> None:
    message = r"include pattern 'class:LlamaAttn' .*mean 'LlamaAttention'.*classes LlamaForCausalLM"
    with pytest.raises(RecipeError, match=message):
        dry_run(checkpoint("llama"), recipe=recipe(include=("class:LlamaAttn",)))


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        (["klass:X"], r"include\[0\] 'klass:X' begins with neither .* did you mean 'class:X'"),
        (["a", "class: "], r"include\[1\] 'class:' has nothing after the colon"),
        ([""], r"include\[0\] is empty"),
    ],
)
def test_malformed_patterns(patterns: list[str], message: str) -> None:
    with pytest.raises(RecipeError, match=f"here: {message}"):
        parse_recipe({"name": "a", "weights": "fp8", "include": patterns}, where="here")


@pytest.mark.parametrize(
    ("weights", "inputs", "name"),
    [
        ("nvfp4", "none", "w4a16_nvfp4"),
        ("nvfp4", "nvfp4", "nvfp4"),
        ("nvfp4_four_over_six", "nvfp4", "nvfp4_four_over_six"),
        ("nvfp4", "fp8", "w4a8_nvfp4_fp8"),
        ("w4a16_nvfp4", "nvfp4", "nvfp4"),
        ("int4_weight_only", "fp8", "w4a8_awq"),
        ("int4_weight_only_64", "fp8", "w4a8_awq_64"),
        ("int8", "none", "int8_weight_only"),
        ("mxfp4", "fp8", "w4a8_mxfp4_fp8"),
        ("mxfp4", "fp8_dynamic", "w4a8_mxfp4_fp8_dynamic"),
        ("none", "fp8", "none"),
    ],
)
def test_inputs_choose_the_format(weights: str, inputs: str, name: str) -> None:
    made = recipe(weights=weights, inputs=inputs)
    assert made.format == name
    assert Override(modules=("a",), weights=weights, inputs=inputs).format == name
    if name != "none":
        assert made.formats == (name,)
        assert made.input_format == inputs


def test_every_format_is_reached_by_its_own_inputs() -> None:
    for fmt in FORMATS.values():
        [name] = [name for name, inputs in INPUTS.items() if inputs == fmt.inputs]
        assert with_inputs(fmt, name) == fmt


@pytest.mark.parametrize(
    ("weights", "inputs", "message"),
    [
        ("fp8", "none", "no format has the weights of 'fp8' and the inputs 'none'.*can be: fp8$"),
        ("nvfp4", "nvpf4", "unknown inputs 'nvpf4'; did you mean 'nvfp4'.; known: none, fp8"),
        ("none", "fp8", "inputs must name how they are rounded"),
        ("nvfp4", 8, "inputs must be text, got 8"),
    ],
)
def test_inputs_that_cannot_be(weights: str, inputs: object, message: str) -> None:
    with pytest.raises(RecipeError, match=f"here: {message}"):
        parse_recipe({"name": "a", "weights": weights, "inputs": inputs}, where="here")


def test_a_recipe_file_and_what_is_shown(tmp_path: Path, checkpoint: MakeCheckpoint) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(
        "weights: nvfp4\ninputs: none\n"
        "overrides:\n- {modules: ['class:LlamaMLP'], weights: int8, inputs: none}\n"
    )
    assert set(formats(dry_run(checkpoint("llama"), recipe=path)).values()) == {
        *("w4a16_nvfp4", "int8_weight_only", "none"),
    }
    shown = json.loads(CliRunner().invoke(cli.app, ["recipes", "show", str(path), "--json"]).stdout)
    assert shown["inputs"] == "none"
    assert shown["overrides"][0]["modules"] == ["class:LlamaMLP"]
    shown = json.loads(CliRunner().invoke(cli.app, ["recipes", "show", "nvfp4", "--json"]).stdout)
    assert shown["inputs"] == "nvfp4"
    assert load_recipe(path).selects_by_class
