"""Searched formats over several ranks: statistics are summed in the order of one process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import quantize, run_ranks, start, wait
from same_bytes import compare, files

MakeCheckpoint = Callable[..., Path]
pytestmark = pytest.mark.dist
WIDE = {"hidden_size": 128, "intermediate_size": 128, "moe_intermediate_size": 128}


@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral", "deepseek_v3"])
@pytest.mark.parametrize("recipe", ["nvfp4_awq_lite", "int4_awq", "int4_gptq"])
def test_searched(
    kind: str,
    recipe: str,
    checkpoint: MakeCheckpoint,
    token_batches: list[torch.Tensor],
    tmp_path: Path,
) -> None:
    sizes: list[tuple[int, int | None]] = [(2, 2), (4, 2)]
    sizes += [(2, 1), (4, 4)] if kind == "qwen3_moe" else []
    wide = {k: v for k, v in WIDE.items() if kind != "mixtral" or not k.startswith("moe")}
    source = checkpoint(kind, num_experts_per_tok=2, **wide)
    options: dict[str, Any] = {"recipe": recipe, "on_bad_shape": "skip"}
    [*_, report] = compare(source, tmp_path, sizes, token_batches[:3], **options)
    assert any("experts" in name for name in report.quantized)


@pytest.mark.parametrize(
    "recipe",
    [
        *("nvfp4_svdquant", "nvfp4_awq_full", "int8_smoothquant"),
        *("nvfp4_w4a4_weight_local_hessian", "nvfp4_w4a4_weight_mse_fp8_sweep"),
    ],
)
def test_other_searches(
    recipe: str, checkpoint: MakeCheckpoint, token_batches: list[torch.Tensor], tmp_path: Path
) -> None:
    compare(checkpoint("mixtral"), tmp_path, [(2, None)], token_batches[:3], recipe=recipe)


@pytest.mark.parametrize("recipe", ["nvfp4_awq_lite", "nvfp4_mse"])
def test_stacked_experts(
    recipe: str, checkpoint: MakeCheckpoint, token_batches: list[torch.Tensor], tmp_path: Path
) -> None:
    compare(checkpoint("gpt_oss"), tmp_path, [(2, 2), (2, 1)], token_batches[:3], recipe=recipe)


def test_stacked_experts_are_not_run_again(
    checkpoint: MakeCheckpoint, token_batches: list[torch.Tensor], tmp_path: Path
) -> None:
    options = {"recipe": "int4_gptq", "on_bad_shape": "skip"}
    source = checkpoint("gpt_oss", hidden_size=128, intermediate_size=128)
    ends = wait(start(2, quantize, source, tmp_path / "out", token_batches[:2], options))
    for ended in ends:
        assert ended.error is not None
        assert "give ep=1" in ended.error
    options_alone = {**options, "ep": 1}
    quantize(source, tmp_path / "a", token_batches[:2], options_alone)
    run_ranks(2, source, tmp_path / "b", token_batches[:2], **options_alone)
    assert files(tmp_path / "a") == files(tmp_path / "b")


def test_what_ranks_do_not_join_is_refused(
    checkpoint: MakeCheckpoint, token_batches: list[torch.Tensor], tmp_path: Path
) -> None:
    source = checkpoint("qwen3_moe")
    for options, said in (
        ({"recipe": "nvfp4_act_headroom"}, "run it in one process"),
        (
            {"recipe": "nvfp4_w4a4_weight_local_hessian", "numerics": "modelopt"},
            "exact numerics",
        ),
    ):
        ends = wait(start(2, quantize, source, tmp_path / "out", token_batches[:2], options))
        for ended in ends:
            assert ended.error is not None
            assert said in ended.error
    assert not (tmp_path / "out").exists()


def test_the_peers_numerics(
    checkpoint: MakeCheckpoint, token_batches: list[torch.Tensor], tmp_path: Path
) -> None:
    options: dict[str, Any] = {"recipe": "nvfp4_awq_lite", "numerics": "modelopt"}
    compare(checkpoint("mixtral"), tmp_path, [(2, None)], token_batches[:3], **options)
