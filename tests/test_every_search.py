"""Each algorithm in each format is refused when a run is planned, or what it exports is sound."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from torch import Tensor

from modelopt_lite import dry_run, quantize_and_export
from modelopt_lite.errors import RecipeError
from modelopt_lite.formats.linear import FORMATS
from modelopt_lite.recipes.algorithms import METHODS, SMOOTHING

SIZES = {"hidden_size": 128, "head_dim": 32, "num_key_value_heads": 4}
# Of those that a search treats alike one is run, and all are planned.
RUN = ("fp8", "int8", "int4_weight_only", "nvfp4", "w4a8_nvfp4_fp8")
CASES = [
    ("qwen3_moe", {"dialect": "modelopt"}),
    ("qwen3_moe", {"dialect": "compressed-tensors"}),
    ("gpt_oss", {"dialect": "modelopt", "numerics": "modelopt"}),
]


@pytest.mark.parametrize(("kind", "options"), CASES, ids=str)
@pytest.mark.parametrize("method", sorted({*METHODS} - {"max"}))
def test_what_is_planned_is_kept(
    method: str,
    kind: str,
    options: dict[str, Any],
    checkpoint: Callable[..., Path],
    token_batches: list[Tensor],
    tmp_path: Path,
) -> None:
    """A run of hours must not end in an export that its own audit refuses."""
    width = "intermediate_size" if kind == "gpt_oss" else "moe_intermediate_size"
    layers = {} if kind == "gpt_oss" else {"num_hidden_layers": 1}
    source = checkpoint(kind, **SIZES, **{width: 128}, **layers)
    recipe, out, kept = tmp_path / "recipe.yaml", tmp_path / "out", set()
    options = {**options, "recipe": recipe, "calib_data": token_batches[:1]}
    for fmt in FORMATS:
        recipe.write_text(f"weights: {fmt}\nalgorithm: {method}\n")
        try:
            dry_run(source, **options)
        except RecipeError:
            continue
        kept.add(fmt)
        if fmt in RUN and (options["dialect"] == "modelopt" or method in SMOOTHING):
            assert quantize_and_export(source, export_dir=out, progress=False, **options)
            shutil.rmtree(out)
    none = method == "svdquant" and options["dialect"] == "compressed-tensors"
    assert bool(kept) != none, kept


@pytest.mark.parametrize("method", sorted(SMOOTHING))
@pytest.mark.parametrize("other", ["int4_weight_only", "int8", "fp8", "none"])
def test_mixtures(
    other: str,
    method: str,
    checkpoint: Callable[..., Path],
    token_batches: list[Tensor],
    tmp_path: Path,
) -> None:
    """Keys and values have fewer heads than queries, so nothing takes up the scales of o_proj."""
    source = checkpoint("llama", hidden_size=128, intermediate_size=128)
    recipe = tmp_path / "recipe.yaml"
    override = f"[{{modules: ['*.down_proj'], weights: {other}}}]"
    recipe.write_text(f"weights: nvfp4\nalgorithm: {method}\noverrides: {override}\n")
    options: dict[str, Any] = {"recipe": recipe, "calib_data": token_batches[:1]}
    try:
        dry_run(source, **options)
    except RecipeError:
        assert other != "none"
        return
    out = tmp_path / "out"
    assert quantize_and_export(source, export_dir=out, progress=False, **options) is not None
    assert any("o_proj.pre_quant_scale" in name for name in load_file(out / "model.safetensors"))


@pytest.mark.parametrize("bits", [5.2, 9.0])
def test_searched_formats(
    bits: float, checkpoint: Callable[..., Path], token_batches: list[Tensor], tmp_path: Path
) -> None:
    """FP8 has no scales of channels: it is no choice where they cannot be folded."""
    source = checkpoint("llama", hidden_size=128, intermediate_size=128)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"auto_quantize: {{formats: [nvfp4, fp8, none], effective_bits: {bits}}}\n"
        "algorithm: awq_lite\n"
    )
    report = quantize_and_export(
        source,
        export_dir=tmp_path / "out",
        recipe=recipe,
        calib_data=token_batches[:1],
        progress=False,
    )
    assert report is not None
    chosen = {name: fmt for name, fmt in report.quantized.items() if name.endswith("o_proj")}
    assert set(chosen.values()) <= {"nvfp4"}
    assert "fp8" in report.quantized.values() or bits < 6
