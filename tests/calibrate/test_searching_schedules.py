"""Searches give the same bytes however a run is scheduled, and after an interruption."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from modelopt_lite import export_hf, quantize, quantize_and_export
from modelopt_lite.calibrate.observe import Site
from modelopt_lite.calibrate.statistics import Statistics
from modelopt_lite.errors import CalibrationError
from modelopt_lite.job import Job, split_layers
from modelopt_lite.report import REPORT_FILE

MakeCheckpoint = Callable[..., Path]
RECIPES = ("nvfp4_awq_lite", "int8_smoothquant", "nvfp4_mse")


def hashes(folder: Path) -> dict[str, str]:
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.iterdir())
        if path.name != REPORT_FILE
    }


def run(source: Path, out: Path, batches: Sequence[torch.Tensor], **options: Any) -> dict[str, str]:
    quantize_and_export(
        source, export_dir=out, calib_data=batches, **{"progress": False, **options}
    )
    return hashes(out)


@pytest.mark.parametrize("recipe", RECIPES)
def test_schedules(
    recipe: str,
    checkpoint: MakeCheckpoint,
    token_batches: list[torch.Tensor],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Streamed, whole, with experts in parts, interrupted, and in memory."""
    source = checkpoint("qwen3_moe")
    streamed = run(source, tmp_path / "a", token_batches, recipe=recipe)
    assert streamed == run(source, tmp_path / "b", token_batches, recipe=recipe, offload="none")

    def stop(phase: str, done: int, total: int) -> None:
        if phase.endswith("layers.0"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt, match="run the same again"):
        run(source, tmp_path / "c", token_batches, recipe=recipe, progress=stop)
    assert streamed == run(source, tmp_path / "c", token_batches, recipe=recipe)

    monkeypatch.setattr(Job, "fit", lambda job, _: split_layers(job.plan, job.model, 3))
    assert streamed == run(source, tmp_path / "d", token_batches, recipe=recipe)

    def loop(model: Any) -> None:
        for batch in token_batches:
            model(batch)

    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    quantize(model, recipe, loop)
    export_hf(model, tmp_path / "e", source=source)
    assert streamed == hashes(tmp_path / "e")


def test_resumed_report(
    checkpoint: MakeCheckpoint, token_batches: list[torch.Tensor], tmp_path: Path
) -> None:
    """The amax of smoothed inputs survives an interruption."""
    source = checkpoint("mixtral")
    options: dict[str, Any] = {"recipe": "nvfp4_awq_lite", "progress": False}
    whole = quantize_and_export(
        source, export_dir=tmp_path / "a", calib_data=token_batches, **options
    )

    def stop(phase: str, done: int, total: int) -> None:
        if phase.endswith("layers.1"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(source, tmp_path / "b", token_batches, recipe="nvfp4_awq_lite", progress=stop)
    resumed = quantize_and_export(
        source, export_dir=tmp_path / "b", calib_data=token_batches, **options
    )
    assert resumed.input_amax == whole.input_amax
    assert resumed.relative_errors == whole.relative_errors


def test_a_layer_that_runs_twice_is_refused() -> None:
    statistics = Statistics(["channels"])
    site = Site("layer.weight")
    statistics.visit(site, torch.ones(2, 3), False)
    statistics.drop([site])
    with pytest.raises(CalibrationError, match="runs more than once"):
        statistics.visit(site, torch.ones(2, 3), False)
