"""Experts in other layouts, sharded over ranks: the bytes of one process."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from same_bytes import compare
from small import make_small, make_wren

from modelopt_lite import dry_run

MakeCheckpoint = Callable[..., Path]
pytestmark = pytest.mark.dist
BOTH: list[tuple[int, int | None]] = [(2, 2), (4, 2)]


def recipe_of(name: str, folder: Path) -> str:
    """Return a recipe; INT4 in groups that narrow matrices have."""
    if name != "int4_gptq":
        return name
    path = folder / "narrow.yaml"
    path.write_text("weights: int4_weight_only\nalgorithm: gptq\ngroup_size: 16\n")
    return str(path)


# --- matrices cut from tensors on disk that hold all experts


@pytest.mark.parametrize("recipe", ["fp8", "nvfp4", "nvfp4_awq_lite", "int4_gptq"])
@pytest.mark.parametrize("turned", [False, True], ids=["upright", "turned"])
def test_experts_cut_from_stacks(
    recipe: str, turned: bool, token_batches: list[torch.Tensor], tmp_path: Path
) -> None:
    source = make_small(tmp_path / "source", "qwen3_vl_moe", turned=turned)
    given: dict[str, Any] = {"recipe": recipe_of(recipe, tmp_path)}
    [*_, report] = compare(source, tmp_path, BOTH, token_batches[:3], **given)
    assert any(".experts.3.up_proj" in name for name in report.quantized)
    if recipe == "fp8":  # which reads no expert again
        given |= {"calib_data": token_batches[:3], "export_dir": tmp_path / "planned", "ep": 2}
        planned = dry_run(source, world_size=4, **given)["parallel"]["ranks"]
        read = [rank["bytes_read"] for rank in report.ranks]
        assert read == [rank["bytes_read"] for rank in planned]
        experts = 2 * 4 * (96 * 64 + 64 * 48) * 2  # bytes of two layers of four, in bfloat16
        assert read[0] == report.source_bytes - experts / 2


# --- experts that all see every token


@pytest.mark.parametrize("recipe", ["fp8", "nvfp4", "nvfp4_awq_lite"])
def test_experts_that_see_every_token(
    recipe: str, checkpoint: MakeCheckpoint, token_batches: list[torch.Tensor], tmp_path: Path
) -> None:
    source = checkpoint("llama4_text")
    [*_, report] = compare(source, tmp_path, BOTH, token_batches[:3], recipe=recipe)
    experts = 2 * 4 * (32 * 2 * 64 + 64 * 32) * 2  # bytes of two layers of four, in bfloat16
    if recipe == "fp8":  # rank 0 reads its share for the passes, and all that it exports
        assert report.ranks[0]["bytes_read"] == report.source_bytes + experts / 2


# --- experts that are modules of their own, in code that comes with the checkpoint


@pytest.fixture
def wren(tmp_path: Path) -> Path:
    """A checkpoint with its own code, whose config says which parameters are experts."""
    source = tmp_path / "wren"
    make_wren(source)
    path = source / "config.json"
    config = json.loads(path.read_text())
    roles = ("bend", "lift", "land")
    config["base_model_ep_plan"] = {
        f"layers.*.flock.experts.*.{role}.weight": "grouped_gemm" for role in roles
    }
    path.write_text(json.dumps(config))
    return source


@pytest.mark.parametrize("recipe", ["fp8", "nvfp4_awq_lite", "int4_gptq"])
def test_experts_that_are_modules(
    recipe: str, wren: Path, token_batches: list[torch.Tensor], tmp_path: Path
) -> None:
    given: dict[str, Any] = {"recipe": recipe, "trust_remote_code": True}
    [*_, report] = compare(wren, tmp_path, BOTH, token_batches[:3], **given)
    assert any(".experts.3.land" in name for name in report.quantized)
