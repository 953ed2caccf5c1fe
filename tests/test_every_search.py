"""Each algorithm in each format is refused when a run is planned, or what it exports is sound."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from modelopt_lite import dry_run, quantize_and_export
from modelopt_lite.errors import RecipeError
from modelopt_lite.formats.linear import FORMATS
from modelopt_lite.recipes.algorithms import METHODS

SIZES = {"hidden_size": 128, "head_dim": 32, "num_key_value_heads": 4}
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
        assert quantize_and_export(source, export_dir=out, progress=False, **options) is not None
        kept.add(fmt)
        shutil.rmtree(out)
    none = method == "svdquant" and options["dialect"] == "compressed-tensors"
    assert bool(kept) != none, kept
