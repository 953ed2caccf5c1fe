from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

MakeCheckpoint = Callable[..., Path]


@pytest.fixture
def make_checkpoint(tmp_path: Path) -> MakeCheckpoint:
    """Write shards, and an index where there are more than one, into ``tmp_path / "source"``."""

    def make(*shards: dict[str, Tensor], config: dict[str, Any] | None = None) -> Path:
        folder = tmp_path / "source"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config or {"model_type": "llama"}))
        if len(shards) == 1:
            save_file(shards[0], folder / "model.safetensors")
            return folder
        weight_map: dict[str, str] = {}
        for i, shard in enumerate(shards, start=1):
            name = f"model-{i:05d}-of-{len(shards):05d}.safetensors"
            save_file(shard, folder / name)
            weight_map |= dict.fromkeys(shard, name)
        (folder / "model.safetensors.index.json").write_text(
            json.dumps({"metadata": {}, "weight_map": weight_map})
        )
        return folder

    return make


@pytest.fixture
def tensors() -> dict[str, Tensor]:
    """One small tensor of most dtypes, with values that differ everywhere."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(6, 8, generator=generator) * 20
    return {
        "a.f32": values.clone(),
        "b.bf16": values.bfloat16(),
        "c.scalar": torch.tensor(1.5),
        "d.fp8": values.to(torch.float8_e4m3fn),
        "e.u8": torch.arange(7, dtype=torch.uint8),
        "f.bool": values > 0,
        "g.empty": torch.empty(0, 3, dtype=torch.float16),
        "h.i64": torch.arange(5) - 2**40,
    }
