"""Searched formats over several ranks: statistics are summed in the order of one process."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from breaking import counting, weighing
from ranks import quantize, run_ranks, start, wait
from same_bytes import compare, files

from modelopt_lite.request import Options, make_request

MakeCheckpoint = Callable[..., Path]
pytestmark = pytest.mark.dist


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


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("gpt_oss", {"recipe": "nvfp4_mse"}),
        ("mixtral", {"recipe": "nvfp4_act_headroom"}),
        ("gpt_oss", {"recipe": "nvfp4_act_headroom"}),
        ("mixtral", {"recipe": "nvfp4_awq_lite", "numerics": "modelopt"}),
        ("mixtral", {"recipe": "int4_gptq", "numerics": "modelopt", "on_bad_shape": "skip"}),
        ("qwen3_moe", {"recipe": "fp8", "kv_cache": "nvfp4_affine"}),
        ("qwen3_moe", {"recipe": "fp8", "kv_cache": "fp8_affine", "numerics": "modelopt"}),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(map(str, value.values())),
)
def test_what_rank_0_keeps_or_chooses_for_all(
    kind: str,
    options: dict[str, Any],
    checkpoint: MakeCheckpoint,
    token_batches: list[torch.Tensor],
    tmp_path: Path,
) -> None:
    blocks = {"hidden_size": 128, "intermediate_size": 128}
    source = checkpoint(
        kind,
        **(blocks if options["recipe"].startswith("int4") else {}),
        **({"head_dim": 16} if "kv_cache" in options else {}),  # whole blocks of NVFP4
    )
    compare(source, tmp_path, [(2, 2)], token_batches[:3], **options)


def test_each_rank_searches_by_its_experts(
    checkpoint: MakeCheckpoint, token_batches: list[torch.Tensor], tmp_path: Path
) -> None:
    source = checkpoint("mixtral")  # 4 experts of 3 matrices and 4 others in each of 2 layers
    [alone] = wait(start(1, counting, source, tmp_path / "alone", token_batches))
    shared = wait(start(4, counting, source, tmp_path / "shared", token_batches))
    assert alone.value == 2 * (4 * 3 + 4)
    assert [ended.value for ended in shared] == [2 * (3 + 4), 2 * 3, 2 * 3, 2 * 3]


@pytest.mark.parametrize("recipe", ["nvfp4_awq_lite", "nvfp4_w4a4_weight_local_hessian"])
@pytest.mark.parametrize("ep", [2, 1])
def test_what_a_rank_keeps_is_foretold_by_its_experts(
    recipe: str,
    ep: int,
    checkpoint: MakeCheckpoint,
    token_batches: list[torch.Tensor],
    tmp_path: Path,
) -> None:
    # Every expert sees every token, so that routing has no say; batches are of one size.
    source = checkpoint("mixtral", num_local_experts=2, num_experts_per_tok=2)
    batches = token_batches[:2]
    options = Options(recipe=recipe, calib_data=batches, ep=ep, export_dir=tmp_path / "x")
    ends = wait(start(2, weighing, source, tmp_path / "out", batches, recipe, ep))
    for rank, ended in enumerate(ends):
        request = make_request(source, options, world_size=2, rank=rank)
        request.load_data()
        request.make_schedule()
        work = request.prediction().work
        assert ended.error is None
        assert ended.value == (work["statistics of inputs"], work["inputs told to other ranks"])


def test_formats_are_chosen_once(
    checkpoint: MakeCheckpoint, token_batches: list[torch.Tensor], tmp_path: Path
) -> None:
    recipe = tmp_path / "auto.yaml"
    recipe.write_text("auto_quantize:\n  formats: [nvfp4, fp8]\n  effective_bits: 6.0\n")
    source, given = checkpoint("mixtral"), {"recipe": str(recipe)}
    alone = quantize(source, tmp_path / "a", token_batches, given)
    reports = run_ranks(2, source, tmp_path / "b", token_batches, **given)
    assert len(set(alone.quantized.values())) == 2
    assert [report.quantized for report in reports] == [alone.quantized] * 2
    assert files(tmp_path / "a") == files(tmp_path / "b")
    assert sorted(path.name for path in tmp_path.glob("*-search")) == ["a-search", "b-search"]


def test_what_ranks_do_not_join_is_refused(
    checkpoint: MakeCheckpoint, token_batches: list[torch.Tensor], tmp_path: Path
) -> None:
    source = checkpoint("qwen3_moe")
    for options, said in (
        (
            {"recipe": "nvfp4_w4a4_weight_local_hessian", "numerics": "modelopt"},
            "exact numerics",
        ),
        ({"recipe": "fp8", "effective_bits": 5.0}, "the formats of the recipe 'fp8' are settled"),
    ):
        begun = time.monotonic()
        ends = wait(start(2, quantize, source, tmp_path / "out", token_batches[:2], options))
        assert time.monotonic() - begun < 12  # none waits for one that has ended
        for ended in ends:
            assert ended.error is not None
            assert said in ended.error
    assert not (tmp_path / "out").exists()
