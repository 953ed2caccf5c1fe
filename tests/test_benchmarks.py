"""The benchmarks' own parts: a cold cache is cold, and the sides of a comparison do the same."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module benchmarks/offload.py, which finds those beside it."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    for name in ("offload", "coldcache", "synthetic"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    threads, verbosity = torch.get_num_threads(), transformers.utils.logging.get_verbosity()
    yield importlib.import_module("offload")
    torch.set_num_threads(threads)
    transformers.utils.logging.set_verbosity(verbosity)
    transformers.utils.logging.enable_progress_bar()
    for name in ("offload", "coldcache", "synthetic"):
        sys.modules.pop(name, None)


def test_dropped_files_are_cold(benchmark: Any, tmp_path: Path) -> None:
    path = tmp_path / "file"
    with path.open("wb") as file:
        file.write(bytes(1 << 20))
    os.sync()  # dirty pages stay in the cache
    path.read_bytes()
    if not benchmark.cached_bytes([path]):
        pytest.skip("the file system has no page cache of its own")
    assert benchmark.cached_bytes([path]) == 1 << 20
    benchmark.drop([path])
    assert benchmark.cached_bytes([path]) == 0


def test_all_sides_give_the_same_bits(benchmark: Any, tmp_path: Path) -> None:
    synthetic = importlib.import_module("synthetic")
    size = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4}
    folder = synthetic.make_checkpoint(
        tmp_path / "model", synthetic.LLAMA, **size, num_hidden_layers=4, vocab_size=512
    )
    work = benchmark.Work(
        folder=str(folder),
        device="cpu",
        resident=0.5,
        share=0.5,
        tokens=8,
        batches=1,
        new_tokens=2,
        threads=1,
    )
    found = {side: benchmark.child(side, work) for side in benchmark.LOADERS}
    assert len({result["digest"] for result in found.values()}) == 1
    for result in found.values():
        assert all(result[key] > 0 for key in ("forward", "generate", "cpu", "peak_rss"))
