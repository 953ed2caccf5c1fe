"""Two accelerators, one process each: the same bytes as one process on one of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from same_bytes import compare

MakeCheckpoint = Callable[..., Path]


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.accelerator.is_available() or torch.accelerator.device_count() < 2,
    reason="needs two accelerators: NCCL takes one process for each",
)
@pytest.mark.parametrize("recipe", ["fp8", "nvfp4_awq_lite"])
def test_two_accelerators(
    recipe: str, checkpoint: MakeCheckpoint, token_batches: list[torch.Tensor], tmp_path: Path
) -> None:
    compare(checkpoint("mixtral"), tmp_path, [(2, None)], token_batches[:3], recipe=recipe)
