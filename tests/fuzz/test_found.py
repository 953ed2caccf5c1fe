"""What fuzzing found, each once more by hand."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch
import yaml
from fuzzing import demands
from safetensors.torch import save_file

from modelopt_lite.dialects.schemes import names
from modelopt_lite.errors import OffloadConfigError, OffloadError, RecipeError
from modelopt_lite.offload import load_config_from_file
from modelopt_lite.offload.profile_io import read_profile
from modelopt_lite.recipes import load_recipe
from modelopt_lite.verify.audit import audit
from modelopt_lite.yamls import load_yaml

LAUGHS = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{c}: &{c} [{', '.join([f'*{p}'] * 9)}]\n" for p, c in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "given"
    made.mkdir()
    return made


@pytest.mark.parametrize("count", [2**40, 2**70, -1, True])
def test_a_count_of_experts_is_only_a_number(folder: Path, count: int) -> None:
    name = "model.layers.0.mlp.experts.{}.up_proj.weight"
    tensors = {name.format(i): torch.ones(2, 2) for i in (0, 999_999_999, "9" * 5000, "²")}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"num_experts": count}))
    with demands(folder):
        found = [f.message for f in audit(folder) if f.rule == "expert-missing"]
    assert any("experts.1.up_proj" in message for message in found)


@pytest.mark.parametrize(
    "text",
    [
        LAUGHS,
        "weights: " + "[" * 3000,
        "weights: &a [*a]",
        "weights: 2001-99-99",
        "weights: " + "9" * 5000,
        "weights: !!python/object/apply:os.getcwd []",
        "x: " + "a" * (1 << 20),
    ],
)
def test_yaml_is_refused_with_a_word(folder: Path, text: str) -> None:
    path = folder / "hostile.yaml"
    path.write_text(text)
    with demands(folder):
        with pytest.raises(RecipeError, match=r"hostile.yaml is no valid YAML"):
            load_recipe(path)
        with pytest.raises(OffloadConfigError, match=r"hostile.yaml cannot be read"):
            load_config_from_file(path)


@pytest.mark.parametrize("text", ["x: " + "[" * 3000, "[" * 900 + "]" * 900, "{a: [" * 400])
def test_brackets_in_brackets_take_no_time(text: str) -> None:
    """PyYAML takes seconds for them."""
    started = time.process_time()
    with pytest.raises(yaml.YAMLError, match="nested too deep"):
        load_yaml(text)
    assert time.process_time() - started < 0.1
    assert load_yaml("[" * 50 + "]" * 50)


def test_aliases_may_be_used() -> None:
    assert load_yaml("a: &x [1, 2]\nb: *x\nc: *x") == {"a": [1, 2], "b": [1, 2], "c": [1, 2]}


def test_json_that_is_nested_too_deep(folder: Path) -> None:
    for name in ("profile.json", "config.json"):
        (folder / name).write_text("[" * 100_000)
    with pytest.raises(OffloadError, match="cannot be read"):
        read_profile(folder)
    with pytest.raises(OffloadConfigError, match="cannot be read"):
        load_config_from_file(folder / "config.json")


def test_an_expression_of_a_config_takes_no_time(folder: Path) -> None:
    with demands(folder):
        assert not names("re:(a+)+$", "a" * 60 + "!")
        assert not names("re:(", "a")
