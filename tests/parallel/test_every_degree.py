"""Models, formats and degrees that must give the bytes of one process, each with each.

Every pair of a model and a format runs with all four degrees, two of them with batches that the
ranks share evenly, two with others; `EVERY_BATCH=1` runs all degrees with both.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from composite import make_composite
from same_bytes import compare

MakeCheckpoint = Callable[..., Path]
pytestmark = pytest.mark.dist

KINDS = ("qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss", "glm4v_moe")
RECIPES = ("fp8", "nvfp4", "nvfp4_awq_lite", "int4_awq", "int4_gptq")
# (ranks, ranks that share the experts): ep x edp of 1x2, 4x1 and of 2x1, 2x2.
DEGREES: tuple[list[tuple[int, int | None]], ...] = ([(2, 1), (4, 4)], [(2, 2), (4, 2)])
BLOCKS = {"hidden_size": 128, "intermediate_size": 128, "moe_intermediate_size": 128}


def make(kind: str, recipe: str, checkpoint: MakeCheckpoint, folder: Path) -> Path:
    """Write a checkpoint whose matrices the recipe's blocks fit in."""
    wide = BLOCKS if recipe.startswith("int4") else {}
    if kind == "glm4v_moe":
        return make_composite(folder, **wide)
    if kind in ("mixtral", "gpt_oss"):
        wide = {k: v for k, v in wide.items() if not k.startswith("moe")}
    return checkpoint(kind, **wide)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kind", KINDS)
def test_every_degree(
    kind: str,
    recipe: str,
    checkpoint: MakeCheckpoint,
    token_batches: list[torch.Tensor],
    tmp_path: Path,
) -> None:
    source = make(kind, recipe, checkpoint, tmp_path / "source")
    options: dict[str, Any] = {"recipe": recipe, "on_bad_shape": "skip"}
    turn = (KINDS.index(kind) + RECIPES.index(recipe)) % 2
    evenly, others = DEGREES[turn], DEGREES[1 - turn]
    if os.environ.get("EVERY_BATCH"):
        evenly = others = [*DEGREES[0], *DEGREES[1]]
    for count, sizes in ((4, evenly), (3, others)):
        batches, out = token_batches[:count], tmp_path / f"{count} batches"
        out.mkdir()
        [*_, report] = compare(source, out, sizes, batches, **options)
        assert any(".experts" in name for name in report.quantized)
