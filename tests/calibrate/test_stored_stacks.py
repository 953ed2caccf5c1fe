"""Searches leave alone stacks whose blocks run as they lie on disk."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal

import pytest
from torch import Tensor

from modelopt_lite import quantize_and_export
from modelopt_lite.errors import RecipeError

RECIPE = """
weights: w4a8_nvfp4_fp8
include: ["*.experts.down_proj"]
algorithm: {}
"""


@pytest.mark.parametrize("method", ["mse", "gptq"])
def test_scales_are_not_chosen_along_another_axis(
    method: str, checkpoint: Callable[..., Path], token_batches: list[Tensor], tmp_path: Path
) -> None:
    """A square stack would take transposed scales without a word."""
    source = checkpoint("gpt_oss", hidden_size=64, intermediate_size=64)

    def run(algorithm: str, numerics: Literal["exact", "modelopt"]) -> set[str]:
        recipe = tmp_path / f"{algorithm}.yaml"
        recipe.write_text(RECIPE.format(algorithm))
        report = quantize_and_export(
            source,
            export_dir=tmp_path / f"{algorithm}-{numerics}",
            recipe=recipe,
            numerics=numerics,
            calib_data=token_batches,
            progress=False,
        )
        assert report is not None
        return set(report.quantized)

    with pytest.raises(RecipeError, match=rf"'{method}' chooses scales along what is multiplied"):
        run(method, "modelopt")
    quantized = run("max", "modelopt")
    assert quantized
    assert run(method, "exact") == quantized
