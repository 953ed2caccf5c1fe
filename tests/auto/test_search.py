"""A recipe that leaves formats to a search: planned, searched, saved, written, exported."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from modelopt_lite import dry_run, quantize_and_export
from modelopt_lite.auto.search import Search, fitting_batches
from modelopt_lite.errors import OutputError, RecipeError, ShapeError
from modelopt_lite.recipes import load_recipe

MakeCheckpoint = Callable[..., Path]
RECIPE = "auto_quantize:\n  formats: [nvfp4, fp8]\n  effective_bits: 5.0\n"


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "mixed.yaml"
    path.write_text(RECIPE)
    return path


def weights_of(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()


def test_from_a_recipe_to_exports_of_both_dialects(
    checkpoint: MakeCheckpoint,
    token_batches: list[Tensor],
    tmp_path: Path,
    recipe: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source, out = checkpoint("qwen3_moe"), tmp_path / "out"
    options: dict[str, Any] = {"calib_data": token_batches, "dialect": "both"}
    planned = dry_run(source, recipe=recipe, export_dir=out, **options)
    assert not planned["problems"]
    assert not out.with_name("out-search").exists()
    search = planned["search"]
    assert search["reads"] == {"decoder layers": 2, "embedding": 1, "head": 1, "others": 1}
    assert not search["saved"]
    assert any("not chosen yet" in note for note in planned["notes"])

    report = quantize_and_export(source, recipe=recipe, export_dir=out, progress=False, **options)
    assert len(set(report.quantized.values())) == 2
    assert report.seconds["choose formats"] > 0
    section = json.loads((out / "modelopt" / "config.json").read_text())["quantization_config"]
    assert section["quant_algo"] == "MIXED_PRECISION"
    told = json.loads((out / "compressed-tensors" / "config.json").read_text())
    assert len(told["quantization_config"]["config_groups"]) == 2

    # The recipe that was written gives the same export, and the scores serve again.
    [written] = (tmp_path / "out-search").glob("*.yaml")
    chosen = load_recipe(written)
    assert chosen.auto_quantize is None
    assert chosen.name == "mixed"
    again = tmp_path / "again"
    quantize_and_export(source, recipe=written, export_dir=again, progress=False, **options)
    for dialect in ("modelopt", "compressed-tensors"):
        assert weights_of(again / dialect) == weights_of(out / dialect)

    def run(self: Search) -> Any:
        pytest.fail("the scores are there")

    monkeypatch.setattr(Search, "run", run)
    known = {"search_dir": tmp_path / "out-search", "effective_bits": 8.5, **options}
    planned = dry_run(source, recipe=recipe, export_dir=tmp_path / "more", **known)
    assert planned["search"]["saved"]
    more = quantize_and_export(
        source, recipe=recipe, export_dir=tmp_path / "more", progress=False, **known
    )
    assert more.bits_per_weight > report.bits_per_weight
    assert {n: m["format"] for n, m in planned["linears"].items() if "format" in m} == (
        more.quantized
    )


def test_the_choice_keeps_to_the_bits_and_to_the_groups(
    checkpoint: MakeCheckpoint, token_batches: list[Tensor], tmp_path: Path, recipe: Path
) -> None:
    source = checkpoint("deepseek_v3")
    report = quantize_and_export(
        source,
        recipe=recipe,
        export_dir=tmp_path / "out",
        calib_data=token_batches,
        progress=False,
    )
    sizes = json.loads(next((tmp_path / "out-search").glob("scores-*.json")).read_text())["groups"]
    total = 0
    for group in sizes:
        [fmt] = {report.quantized.get(member, "none") for member in group["members"]}
        total += group["bytes"][fmt]
    weights = sum(group["weights"] for group in sizes)
    assert 0 <= 5.0 - 8 * total / weights < 0.5
    one = {member for group in sizes for member in group["members"] if ".layers.1." in member}
    assert sum("experts." in name and "shared" not in name for name in one) == 12
    [experts] = [group for group in sizes if group["name"].endswith("layers.1.mlp.experts")]
    assert experts["modules"] == ["model.layers.1.mlp.experts"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"effective_bits": 4.0},
            "the fewest that nvfp4, fp8 can reach on this model is 4.5",
        ),
        ({"effective_bits": 0}, "above 0 and at most 32, got 0"),
        ({"numerics": "modelopt"}, "searches with exact numerics"),
        ({"recipe": "fp8", "effective_bits": 5.0}, "the formats of the recipe 'fp8' are settled"),
    ],
)
def test_what_is_refused(
    options: dict[str, Any], message: str, checkpoint: MakeCheckpoint, recipe: Path
) -> None:
    with pytest.raises(RecipeError, match=message):
        dry_run(checkpoint("llama"), **{"recipe": recipe, **options})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("auto_quantize: 6", "must have formats and effective_bits, got 6"),
        ("auto_quantize: {bits: 6}", "no key 'bits'"),
        ("auto_quantize: {formats: nvfp4, effective_bits: 6}", "list of formats"),
        ("auto_quantize: {formats: [nvfp4], effective_bits: 6}", "two or more different"),
        ("auto_quantize: {formats: [nvfp4, fp8]}", "above 0 and at most 32, got None"),
        (
            "auto_quantize: {formats: [nvfp4, fp8], effective_bits: 6, method: gradients}",
            "did you mean 'gradient'",
        ),
        (f"{RECIPE}weights: fp8", "leave weights and overrides out"),
    ],
)
def test_recipes_that_mean_nothing(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(RecipeError, match=message):
        load_recipe(path)


def test_unknown_format(checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(RECIPE.replace("nvfp4", "nvfp5"))
    with pytest.raises(RecipeError, match="unknown format 'nvfp5'; did you mean 'nvfp4'"):
        dry_run(checkpoint("llama"), recipe=path)


def test_shapes_that_no_format_can_hold(checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    source = checkpoint("llama", intermediate_size=72)  # down_proj reads 72 channels
    path = tmp_path / "four.yaml"
    path.write_text("auto_quantize:\n  formats: [nvfp4, mxfp4]\n  effective_bits: 8\n")
    with pytest.raises(ShapeError, match=r"hold all of model.layers.0.mlp.down_proj .*72"):
        dry_run(source, recipe=path)
    planned = dry_run(source, recipe=path, on_bad_shape="skip")
    left = [name for name, linear in planned["linears"].items() if "excluded" in linear]
    assert left == ["lm_head", "model.layers.0.mlp.down_proj", "model.layers.1.mlp.down_proj"]


def test_damaged_scores(
    checkpoint: MakeCheckpoint, token_batches: list[Tensor], tmp_path: Path, recipe: Path
) -> None:
    source = checkpoint("llama")
    options: dict[str, Any] = {
        "recipe": recipe,
        "search_dir": tmp_path / "search",
        "calib_data": token_batches,
    }
    quantize_and_export(source, export_dir=tmp_path / "a", progress=False, **options)
    [path] = (tmp_path / "search").glob("scores-*.json")
    path.write_text(path.read_text().replace('"fp8": ', '"fp9": '))
    with pytest.raises(OutputError, match="it lacks groups or formats"):
        dry_run(source, export_dir=tmp_path / "b", **options)


def test_two_searches_in_one_folder(
    checkpoint: MakeCheckpoint, token_batches: list[Tensor], tmp_path: Path, recipe: Path
) -> None:
    source = checkpoint("llama")
    options: dict[str, Any] = {
        "recipe": recipe,
        "search_dir": tmp_path / "search",
        "calib_data": token_batches,
    }
    refused: list[Any] = []

    def nested(phase: str, done: int, total: int) -> None:
        if refused or list((tmp_path / "search").glob("scores-*.json")):
            return
        with pytest.raises(OutputError, match=rf"\(process {os.getpid()}\) searches") as error:
            quantize_and_export(source, export_dir=tmp_path / "b", progress=False, **options)
        refused.append(error)

    quantize_and_export(source, export_dir=tmp_path / "a", progress=nested, **options)
    assert refused
    left = {path.suffix for path in (tmp_path / "search").iterdir()}
    assert left == {".json", ".yaml"}


def test_batches_are_cut_to_their_logits() -> None:
    ids = torch.arange(8 * 512).view(8, 512)
    cut = fitting_batches([ids, ids[:1]], 1 << 16)
    assert [tuple(part.shape) for part in cut] == [(2, 512)] * 4 + [(1, 512)]
    assert torch.equal(torch.cat(cut[:4]), ids)
