"""Recipes, options and shapes that cannot be."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from modelopt_lite import Recipe, quantize_and_export
from modelopt_lite.errors import (
    CalibrationError,
    RecipeError,
    ShapeError,
)
from modelopt_lite.verify.audit import audit

MakeCheckpoint = Callable[..., Path]
Refuse = Callable[..., str]


@pytest.mark.parametrize(
    ("recipe", "says"),
    [
        ("nvpf4", "did you mean 'nvfp4'"),
        ("fp88", "did you mean 'fp8'"),
        ("int3", "presets: "),
        ("nowhere.yaml", "nowhere.yaml"),
        (Recipe(name="mine", weights="nvfp5"), "did you mean 'nvfp4'"),
    ],
)
def test_unknown_recipe_or_format(
    checkpoint: MakeCheckpoint, refuse: Refuse, recipe: Any, says: str
) -> None:
    refuse(RecipeError, checkpoint("llama"), says, recipe=recipe)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("weigths: fp8", "did you mean 'weights'"),
        ("weights: fp9", "did you mean 'fp8'"),
        ("weights: fp8\ninclude: mlp", "list of patterns"),
        ("weights: [fp8", "no valid YAML"),
        ("- fp8", "mapping"),
        ("weights: fp8\nkv_cache: fp9", "did you mean 'fp8'"),
        ("include: ['*.mlp']", "weights must name a format"),
    ],
)
def test_bad_recipe_file(
    checkpoint: MakeCheckpoint, refuse: Refuse, tmp_path: Path, text: str, says: str
) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    refuse(RecipeError, checkpoint("llama"), says, recipe=path)


@pytest.mark.parametrize("kind", ["include", "exclude"])
def test_pattern_that_matches_nothing(
    checkpoint: MakeCheckpoint, refuse: Refuse, kind: str
) -> None:
    patterns = ("*.mlp", "*.experts_typo*")
    included = patterns if kind == "include" else ()
    excluded = patterns if kind == "exclude" else ()
    recipe = Recipe(name="mine", weights="fp8", include=included, exclude=excluded)
    refuse(RecipeError, checkpoint("qwen3_moe"), "'*.experts_typo*'", kind, recipe=recipe)


def test_nothing_is_left_to_quantize(checkpoint: MakeCheckpoint, refuse: Refuse) -> None:
    recipe = Recipe(name="mine", weights="fp8", exclude=("*",))
    refuse(RecipeError, checkpoint("llama"), "quantizes nothing", recipe=recipe)
    refuse(RecipeError, checkpoint("llama"), "quantizes nothing", recipe="nvfp4_experts_only")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"dialect": "compresed"}, "'compresed'"),
        ({"numerics": "exakt"}, "'exakt'"),
        ({"offload": "disk"}, "'disk'"),
        ({"on_bad_shape": "ignore"}, "'ignore'"),
        ({"kv_cache": "fp4"}, "'fp4'"),
        ({"device": "warp"}, "'warp'"),
        ({"max_shard_size": "10 bananas"}, "10 bananas"),
        ({"max_shard_size": 0}, "0"),
        ({"disk_scratch": "all"}, "'all'"),
        ({"host_memory": "1KB"}, "1,000 bytes"),
        ({"device_memory": "1KB"}, "1,000 bytes"),
    ],
)
def test_bad_option(
    checkpoint: MakeCheckpoint, refuse: Refuse, options: dict[str, Any], says: str
) -> None:
    refuse(RecipeError, checkpoint("llama"), says, **options)


@pytest.mark.parametrize("options", [{"calib_size": 0}, {"calib_seq_len": 1}, {"batch_size": 0}])
def test_bad_calibration_size(
    checkpoint: MakeCheckpoint, refuse: Refuse, options: dict[str, int]
) -> None:
    refuse(CalibrationError, checkpoint("llama"), "at least", **options)


def test_a_budget_that_suffices(
    checkpoint: MakeCheckpoint, token_batches: list[Tensor], tmp_path: Path
) -> None:
    quantize_and_export(
        checkpoint("llama"),
        export_dir=tmp_path / "out",
        calib_data=token_batches,
        host_memory="8GB",
        device_memory="100MB",
        progress=False,
    )
    assert audit(tmp_path / "out") == []


@pytest.mark.parametrize("recipe", ["nvfp4", "w4a16_nvfp4", "nvfp4_mlp_only"])
def test_shape_that_the_block_does_not_divide(
    checkpoint: MakeCheckpoint, refuse: Refuse, recipe: str
) -> None:
    source = checkpoint("llama", intermediate_size=40)
    refuse(ShapeError, source, "down_proj", "[32, 40]", "16", "on_bad_shape", recipe=recipe)


@pytest.mark.parametrize(
    ("kind", "size", "left"),
    [
        ("llama", "intermediate_size", {"down_proj": 2}),
        ("qwen3_moe", "moe_intermediate_size", {"down_proj": 16, "up_proj": 16, "gate_proj": 16}),
    ],
)
def test_skipping_shapes(
    checkpoint: MakeCheckpoint,
    token_batches: list[Tensor],
    tmp_path: Path,
    kind: str,
    size: str,
    left: dict[str, int],
) -> None:
    source, out = checkpoint(kind, **{size: 40}), tmp_path / "out"
    report = quantize_and_export(
        source, export_dir=out, calib_data=token_batches, on_bad_shape="skip", progress=False
    )
    skipped = [n for n, why in report.excluded.items() if "shape" in why or "fuse" in why]
    assert {role: sum(n.endswith(role) for n in skipped) for role in left} == left
    assert any("shape" in note for note in report.fallbacks)
    excluded = json.loads((out / "hf_quant_config.json").read_text())["quantization"]
    assert set(skipped) <= set(excluded["exclude_modules"])
    assert audit(out, source=source, deep=True) == []
