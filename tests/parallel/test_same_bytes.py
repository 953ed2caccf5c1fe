"""Several ranks write the bytes that one process writes, and each reads its own experts alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from breaking import small_second
from ranks import quantize, run_ranks, start, wait
from same_bytes import compare, files

MakeCheckpoint = Callable[..., Path]


def test_two_ranks_write_what_one_process_writes(
    checkpoint: MakeCheckpoint, token_batches: list[torch.Tensor], tmp_path: Path
) -> None:
    source = checkpoint("mixtral")
    alone = quantize(source, tmp_path / "x", token_batches[:3], {"recipe": "fp8"})
    reports = compare(source, tmp_path, [(2, None)], token_batches[:3], recipe="fp8")
    first, second = reports[0].ranks
    assert [r.ranks for r in reports] == [[first, second]] * 2
    # Per expert three matrices of 32 x 64 in bfloat16; two of four experts, in two layers.
    foreign = 2 * 2 * 3 * 32 * 64 * 2
    assert first["bytes_read"] == alone.bytes_read - foreign
    assert second["bytes_read"] <= first["bytes_read"]  # rank 0 reads what no pass brings in, too


@pytest.mark.dist
def test_ranks_without_any_batch(
    checkpoint: MakeCheckpoint, token_batches: list[torch.Tensor], tmp_path: Path
) -> None:
    compare(
        checkpoint("qwen3_moe"),
        tmp_path,
        [(2, None), (4, 2)],
        token_batches[:1],
        recipe="nvfp4",
        kv_cache="fp8",
    )


@pytest.mark.dist
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("llama", {"recipe": "fp8"}),  # dense: batches alone are shared
        ("qwen3_moe", {"recipe": "nvfp4", "moe_calibrate_all_experts": True}),
        ("mixtral", {"recipe": "fp8", "dialect": "both", "max_shard_size": "20KB"}),
        ("mixtral", {"recipe": "fp8", "offload": "none"}),
        ("mixtral", {"recipe": "mxfp8"}),  # needs no data
    ],
    ids=["dense", "all_experts", "dialects", "resident", "data_free"],
)
def test_options(
    kind: str,
    options: dict[str, Any],
    checkpoint: MakeCheckpoint,
    token_batches: list[torch.Tensor],
    tmp_path: Path,
) -> None:
    compare(checkpoint(kind), tmp_path, [(2, None)], token_batches[:3], **options)


@pytest.mark.dist
def test_memory_and_bytes_of_experts_fall_with_the_degree(
    checkpoint: MakeCheckpoint, token_batches: list[torch.Tensor], tmp_path: Path
) -> None:
    source = checkpoint("mixtral", intermediate_size=256)
    experts = 4 * 3 * 32 * 256 * 2  # bytes of a layer's
    peaks, read = {}, {}
    for ep in (1, 2, 4):
        last = run_ranks(4, source, tmp_path / str(ep), token_batches, recipe="fp8", ep=ep)[0]
        peaks[ep] = max(rank["peak_weight_bytes"] for rank in last.ranks)
        read[ep] = [rank["bytes_read"] for rank in last.ranks]
    for ep in (2, 4):
        # Two layers may be in memory at a time, and are, in part, as one is read ahead.
        assert peaks[1] - peaks[ep] >= 0.9 * experts * (1 - 1 / ep)
        assert [a - b for a, b in zip(read[1], read[ep], strict=True)] == [
            2 * experts * (ep - 1) // ep
        ] * 4


@pytest.mark.dist
def test_each_rank_has_its_own_budget(
    checkpoint: MakeCheckpoint, token_batches: list[torch.Tensor], tmp_path: Path
) -> None:
    source = checkpoint("qwen3_moe", num_experts_per_tok=2)
    quantize(source, tmp_path / "alone", token_batches, {"recipe": "nvfp4"})
    ends = wait(start(2, small_second, source, tmp_path / "out", token_batches))
    assert [ended.error for ended in ends] == [None, None]
    assert files(tmp_path / "alone") == files(tmp_path / "out")
    first, second = (rank["peak_weight_bytes"] for rank in ends[0].value.ranks)
    assert second < first
