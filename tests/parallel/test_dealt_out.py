"""Recipes that need no data: ranks share the tensors, and write what one process writes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from breaking import small_units
from ranks import quantize, start, wait
from same_bytes import files

MakeCheckpoint = Callable[..., Path]
pytestmark = pytest.mark.dist


@pytest.mark.parametrize(("size", "recipe"), [(2, "mxfp8"), (4, "w4a16_nvfp4")])
def test_each_rank_reads_its_share(
    size: int,
    recipe: str,
    checkpoint: MakeCheckpoint,
    token_batches: list[torch.Tensor],
    tmp_path: Path,
) -> None:
    source = checkpoint("qwen3_moe")
    alone = quantize(source, tmp_path / "alone", token_batches, {"recipe": recipe})
    ends = wait(start(size, small_units, source, tmp_path / "out", token_batches, recipe, 0))
    assert [ended.error for ended in ends] == [None] * size
    assert files(tmp_path / "out") == files(tmp_path / "alone")
    report = ends[0].value
    assert report.relative_errors == alone.relative_errors
    read = [rank["bytes_read"] for rank in report.ranks]
    assert sum(read) == alone.bytes_read
    assert max(read) < 1.5 / size * alone.bytes_read


@pytest.mark.parametrize("size", [1, 3])
def test_another_number_of_ranks_goes_on(
    size: int, checkpoint: MakeCheckpoint, token_batches: list[torch.Tensor], tmp_path: Path
) -> None:
    source, out = checkpoint("mixtral"), tmp_path / "out"
    alone = quantize(source, tmp_path / "alone", token_batches, {"recipe": "mxfp8"})
    for ended in wait(start(2, small_units, source, out, token_batches, "mxfp8", 4)):
        assert ended.error is not None
    assert not out.exists()
    [left] = tmp_path.glob(".out*")
    ends = wait(start(size, small_units, source, out, token_batches, "mxfp8", 0))
    assert [ended.error for ended in ends] == [None] * size
    report = ends[0].value
    assert report.bytes_read < alone.bytes_read
    assert files(out) == files(tmp_path / "alone")
    assert report.relative_errors == alone.relative_errors
    assert not left.exists()
