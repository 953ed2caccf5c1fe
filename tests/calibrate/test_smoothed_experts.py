"""Smoothing reaches fused experts, which Model Optimizer leaves as they are, and is worth it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from torch import Tensor

from modelopt_lite import Recipe, perplexity, quantize_and_export
from modelopt_lite.recipes.algorithms import METHODS, AlgorithmChoice


@pytest.mark.parametrize("numerics", ["exact", "modelopt"])
def test_experts_with_outliers_lose_less(
    numerics: str, checkpoint: Callable[..., Path], token_batches: list[Tensor], tmp_path: Path
) -> None:
    """Some channels of what experts read are 32 times as large as others, as in trained models."""
    source = checkpoint("qwen3_moe", hidden_size=64)
    file = source / "model.safetensors"
    tensors = load_file(file)
    for name, tensor in tensors.items():
        if name.endswith("post_attention_layernorm.weight"):
            tensor[::16] *= 32
    save_file(tensors, file, metadata={"format": "pt"})
    perplexity(source, text=token_batches, keep=tmp_path / "kept")
    lost = {}
    for method in ("max", "smoothquant"):
        algorithm = AlgorithmChoice(method=method, options=METHODS[method])
        recipe = Recipe(name="e", weights="int8", algorithm=algorithm, include=("*.experts",))
        options: dict[str, Any] = {"numerics": numerics, "recipe": recipe}
        options["calib_data"] = token_batches
        out = tmp_path / method
        quantize_and_export(source, export_dir=out, progress=False, **options)
        found = perplexity(out, text=token_batches, against=tmp_path / "kept").kl
        assert found is not None
        lost[method] = found
    assert lost["smoothquant"] < 0.7 * lost["max"], lost
