"""Recipes: the presets, files of one's own, and errors that name the nearest word."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

import modelopt_lite.recipes as package
from modelopt_lite.errors import RecipeError
from modelopt_lite.formats.linear import FORMATS
from modelopt_lite.recipes import (
    ALIASES,
    AUTO_FORMAT,
    Override,
    Recipe,
    load_recipe,
    parse_recipe,
    preset_names,
)
from modelopt_lite.recipes.written import recipe_text

PRESETS = [
    "auto_nvfp4_fp8",
    "auto_weight_only",
    "fp8",
    "fp8_2d_blockwise_weight_only",
    "fp8_per_channel_per_token",
    "int4_awq",
    "int4_gptq",
    "int4_weight_only",
    "int8",
    "int8_per_channel_per_token",
    "int8_smoothquant",
    "int8_weight_only",
    "mamba_moe_fp8_aggressive",
    "mamba_moe_fp8_conservative",
    "mamba_moe_nvfp4_aggressive",
    "mamba_moe_nvfp4_conservative",
    "mxfp4",
    "mxfp4_mlp_weight_only",
    "mxfp8",
    "nvfp4",
    "nvfp4_act_headroom",
    "nvfp4_awq_clip",
    "nvfp4_awq_full",
    "nvfp4_awq_lite",
    "nvfp4_experts_only",
    "nvfp4_four_over_six",
    "nvfp4_fp8_mha",
    "nvfp4_mlp_only",
    "nvfp4_mlp_weight_only",
    "nvfp4_omlp_only",
    "nvfp4_svdquant",
    "nvfp4_w4a4_weight_local_hessian",
    "nvfp4_w4a4_weight_mse_fp8_sweep",
    "w4a16_nvfp4",
    "w4a8_awq_beta",
    "w4a8_mxfp4_fp8",
    "w4a8_nvfp4_fp8",
]
PARTIAL = {
    "mxfp4_mlp_weight_only",
    "nvfp4_experts_only",
    "nvfp4_mlp_only",
    "nvfp4_mlp_weight_only",
    "nvfp4_omlp_only",
}


def test_presets_are_the_files() -> None:
    assert preset_names() == PRESETS


@pytest.mark.parametrize("name", PRESETS)
def test_preset(name: str) -> None:
    recipe = load_recipe(name)
    assert recipe.name == name
    assert (recipe.weights == AUTO_FORMAT) == name.startswith("auto_")
    assert set(recipe.formats) <= set(FORMATS)
    assert recipe.description.endswith(".")
    assert recipe.kv_cache == ("fp8" if name == "nvfp4_fp8_mha" else None)
    assert bool(recipe.include) == (name in PARTIAL)
    assert bool(recipe.exclude) == name.startswith("mamba")
    if recipe.auto_quantize is None:
        assert recipe.formats == (recipe.weights,)
    data = yaml.safe_load((Path(package.__file__).parent / f"{name}.yaml").read_text())
    assert parse_recipe({"name": name, **data}, where="here") == recipe


@pytest.mark.parametrize(("short", "name"), sorted(ALIASES.items()))
def test_short_names(short: str, name: str) -> None:
    assert name in PRESETS
    assert short not in PRESETS
    assert load_recipe(short) == load_recipe(name)


def test_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("weights: nvfp4\nkv_cache: fp8\nexclude: ['*.o_proj']\ninclude:\n")
    expected = Recipe(name="mine", weights="nvfp4", kv_cache="fp8", exclude=("*.o_proj",))
    assert load_recipe(path) == load_recipe(str(path)) == expected
    path.write_text("name: other\nweights: fp8\n")
    assert load_recipe(path).name == "other"


def test_overrides(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(
        "weights: nvfp4\noverrides:\n- modules: ['*.mlp']\n  weights: fp8\n"
        "- {modules: ['layers.0'], weights: none}\n"
    )
    recipe = load_recipe(path)
    assert recipe.overrides == (
        Override(modules=("*.mlp",), weights="fp8"),
        Override(modules=("layers.0",), weights="none"),
    )
    assert recipe.formats == ("nvfp4", "fp8")
    assert Recipe(name="mine", weights="none").formats == ()


def test_a_recipe_is_returned_as_it_is() -> None:
    recipe = Recipe(name="mine", weights="fp8")
    assert load_recipe(recipe) is recipe


def test_kv_cache_replaces_the_recipes_own() -> None:
    recipe = Recipe(name="mine", weights="fp8", kv_cache="fp8")
    assert load_recipe(recipe).kv_cache == "fp8"
    assert load_recipe(recipe, kv_cache="none").kv_cache is None
    assert load_recipe("fp8", kv_cache="fp8").kv_cache == "fp8"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nvpf4", "unknown recipe 'nvpf4'; did you mean 'nvfp4'.; presets: auto_nvfp4_fp8, "),
        ("nvfp4_mlp", "did you mean 'nvfp4_mlp_only'"),
        ("zzz", "unknown recipe 'zzz'; presets: "),
        ("", "unknown recipe ''"),
        ("none.yaml", "cannot read the recipe none.yaml: No such file"),
    ],
)
def test_no_such_recipe(name: str, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        load_recipe(name)


@pytest.mark.parametrize("kv_cache", ["fp9", "int8", ""])
def test_no_such_kv_cache(kv_cache: str) -> None:
    with pytest.raises(RecipeError, match=f"unknown KV cache format '{kv_cache}'.*known: fp8"):
        load_recipe("fp8", kv_cache=kv_cache)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "weight: fp8",
            "unknown key 'weight'; did you mean 'weights'.; known: algorithm, auto_quantize, ",
        ),
        ("1: fp8", "unknown key 1"),
        ("include: []", 'weights must name a format, or be "none", got None'),
        ("weights: [fp8]", 'weights must name a format, or be "none", got'),
        ("weights: fp8\ninclude: '*.mlp'", "include must be a list of patterns, got '"),
        ("weights: fp8\nexclude: [1]", "exclude must be a list of patterns"),
        ("weights: fp8\nkv_cache: 8", "kv_cache must be text, got 8"),
        ("weights: fp8\nname: 8", "name must be text, got 8"),
        ("weights: fp8\nkv_cache: int4", "unknown KV cache format 'int4'"),
        ("weights: fp8\noverrides: nvfp4", "overrides must be a list, got 'nvfp4'"),
        ("weights: fp8\noverrides: [nvfp4]", r"overrides\[0\] must have modules and weights"),
        (
            "weights: fp8\noverrides: [{modules: ['*.mlp'], weight: nvfp4}]",
            r"overrides\[0\]: unknown key 'weight'; did you mean 'weights'",
        ),
        (
            "weights: fp8\noverrides: [{weights: nvfp4}]",
            r"overrides\[0\] must have a list of modules",
        ),
        ("- weights", "must be a mapping of keys, got list"),
        ("", "must be a mapping of keys, got NoneType"),
        ("a: [", "no valid YAML"),
    ],
)
def test_files_that_mean_nothing(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(RecipeError, match=message):
        load_recipe(path)


@pytest.mark.parametrize("name", [None, ""])
def test_a_name_is_never_empty(name: Any, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump({"name": name, "weights": "fp8"}))
    with pytest.raises(RecipeError, match="name must be"):
        load_recipe(path)


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_bytes(b"\xff\xfe\xfa")
    with pytest.raises(RecipeError, match="no valid YAML"):
        load_recipe(path)


def test_a_written_recipe_is_read_back_the_same() -> None:
    recipe = Recipe(
        name="mine",
        weights="int4_weight_only",
        group_size=(128, 64),
        exclude=("*.layers.0",),
        overrides=(
            Override(modules=("*.layers.1",), weights="fp8"),
            Override(modules=("*.layers.2",), weights="nvfp4", inputs="none"),
        ),
    )
    assert parse_recipe(yaml.safe_load(recipe_text(recipe)), where="written") == recipe
