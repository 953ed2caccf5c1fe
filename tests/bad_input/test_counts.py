"""Configs that count more than the weights hold are refused at once, and nothing is allocated."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from modelopt_lite import dry_run, perplexity
from modelopt_lite.errors import CheckpointError
from modelopt_lite.sanity import check_counts

MakeCheckpoint = Callable[..., Path]
SCRIPT = """
import json, resource, sys, time
from modelopt_lite import dry_run
started = time.process_time()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    dry_run(sys.argv[1], recipe=sys.argv[2], export_dir=sys.argv[3], calib_size=2)
    told = "planned"
except Exception as error:
    told = f"{type(error).__name__}: {error}"
grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
print(json.dumps([told, time.process_time() - started, grown]))
"""


def with_config(folder: Path, **changes: Any) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return folder


@pytest.mark.parametrize("recipe", ["nvfp4", "fp8_per_channel_per_token"])
@pytest.mark.parametrize(("key", "value"), [("num_hidden_layers", 10**9), ("num_experts", 10**9)])
def test_a_billion_is_refused_at_once(
    checkpoint: MakeCheckpoint, tmp_path: Path, key: str, value: int, recipe: str
) -> None:
    """In a process of its own: by memory that it took, imports included, and processor time."""
    folder = with_config(checkpoint("qwen3_moe"), **{key: value})
    command = [sys.executable, "-c", SCRIPT, str(folder), recipe, str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    told, seconds, kilobytes = json.loads(done.stdout.splitlines()[-1])
    assert told.startswith(f"CheckpointError: {folder / 'config.json'}: {key} is 1,000,000,000")
    assert "can be no more than 4,096" in told
    assert seconds < 30
    assert kilobytes < 1 << 20
    assert not (tmp_path / "out").exists()


def test_evaluation_refuses_it_too(checkpoint: MakeCheckpoint) -> None:
    folder = with_config(checkpoint("llama"), num_hidden_layers=10**9)
    started = time.process_time()
    with pytest.raises(CheckpointError, match="num_hidden_layers is 1,000,000,000"):
        perplexity(folder)
    assert time.process_time() - started < 10


def test_a_search_of_formats_refuses_it_too(checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    folder = with_config(checkpoint("llama"), num_hidden_layers=10**9)
    recipe = tmp_path / "auto.yaml"
    recipe.write_text("auto_quantize: {formats: [nvfp4, fp8], effective_bits: 6}\n")
    with pytest.raises(CheckpointError, match="num_hidden_layers is 1,000,000,000"):
        dry_run(folder, recipe=recipe, export_dir=tmp_path / "out")


FOLDER = Path("/models/x")


@pytest.mark.parametrize(
    "config",
    [
        {"text_config": {"num_hidden_layers": 5000}},
        {"vision_config": {"depth": {"num_layers": 5000}}},
        {"n_routed_experts": 70_000},
        {"num_attention_heads": 1e9},
        {"num_experts": float("inf")},
        {"num_experts": float("nan")},
        {"moe": {"second": {"num_local_experts": 10**30}}},
    ],
)
def test_counts_at_any_depth(config: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match="it can be no more than"):
        check_counts(config, [(65536, 128)] * 100, FOLDER)


@pytest.mark.parametrize(
    "config",
    [
        {"num_hidden_layers": 4096, "n_routed_experts": 512, "num_attention_heads": 128},
        {"num_experts": 65_536},
        {"block_size": 1 << 20, "head_dim": 1 << 20, "layer_norm_eps": 1e-5},
        {"max_position_embeddings": 10**7, "vocab_size": 10**9},
        {"use_expert_bias": True, "layer_types": ["full"] * 10},
    ],
)
def test_counts_that_can_be(config: dict[str, Any]) -> None:
    check_counts(config, [(65536, 128)] * 100, FOLDER)


def test_as_many_layers_as_tensors() -> None:
    check_counts({"num_hidden_layers": 10_000}, [(1,)] * 10_000, FOLDER)
    with pytest.raises(CheckpointError, match="can be no more than 10,000"):
        check_counts({"num_hidden_layers": 10_001}, [(1,)] * 10_000, FOLDER)
