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

MOE: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
}
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
@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss"])
@pytest.mark.parametrize("recipe", ["fp8", "nvfp4"])
def test_every_degree(
    kind: str,
    recipe: str,
    checkpoint: MakeCheckpoint,
    token_batches: list[torch.Tensor],
    tmp_path: Path,
) -> None:
    sizes = [(2, 2), (2, 1), (4, 2), (4, 4)]
    compare(checkpoint(kind), tmp_path, sizes, token_batches, recipe=recipe)


@pytest.mark.dist
@pytest.mark.parametrize("count", [1, 3])
def test_uneven_batches_and_ranks_without_any(
    count: int, checkpoint: MakeCheckpoint, token_batches: list[torch.Tensor], tmp_path: Path
) -> None:
    compare(
        checkpoint("qwen3_moe"),
        tmp_path,
        [(2, None), (4, None), (4, 2)],
        token_batches[:count],
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


@pytest.fixture
def vision_language(tmp_path: Path) -> Path:
    """Write a composite checkpoint: its experts are in the text model."""
    import transformers

    if not hasattr(transformers, "Glm4vMoeForConditionalGeneration"):
        pytest.skip("no composite with experts")
    text = {
        **MOE,
        "pad_token_id": 0,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": [1, 1, 2],
            "partial_rotary_factor": 1.0,
        },
    }
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 4}
    vision |= {"out_hidden_size": 32, "patch_size": 4, "image_size": 16}
    tokens = {f"{kind}_token_id": 60 + at for at, kind in enumerate(("image", "video"))}
    config = transformers.AutoConfig.for_model(
        "glm4v_moe", text_config=text, vision_config=vision, **tokens
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForImageTextToText.from_config(config).to(torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape) * 0.05 + (parameter.ndim == 1))
    model.save_pretrained(tmp_path / "vlm")
    return tmp_path / "vlm"


@pytest.mark.dist
@pytest.mark.parametrize("recipe", ["fp8", "nvfp4"])
def test_a_composite(
    recipe: str, vision_language: Path, token_batches: list[torch.Tensor], tmp_path: Path
) -> None:
    sizes: list[tuple[int, int | None]] = [(2, None), (4, 2)]
    [*_, last] = compare(vision_language, tmp_path, sizes, token_batches[:3], recipe=recipe)
    assert any(".experts." in name for name in last.quantized)
