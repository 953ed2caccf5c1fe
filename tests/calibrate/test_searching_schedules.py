"""Searches give the same bytes however a run is scheduled, and after an interruption."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from modelopt_lite import Recipe, export_hf, quantize, quantize_and_export
from modelopt_lite.budgets import Schedule
from modelopt_lite.calibrate.observe import Site
from modelopt_lite.calibrate.statistics import Statistics
from modelopt_lite.errors import CalibrationError, RecipeError
from modelopt_lite.job import Job, split_layers
from modelopt_lite.recipes.algorithms import METHODS, AlgorithmChoice
from modelopt_lite.report import CARD_FILE, OF_THE_RUN, Report

MakeCheckpoint = Callable[..., Path]
RECIPES = ("nvfp4_awq_lite", "int8_smoothquant", "nvfp4_mse")


def weights(files: dict[str, str]) -> dict[str, str]:
    """All but the card, which tells who calibrated."""
    return {name: value for name, value in files.items() if name != CARD_FILE}


def hashes(folder: Path) -> dict[str, str]:
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.iterdir())
        if path.name not in OF_THE_RUN
    }


def run(source: Path, out: Path, batches: Sequence[torch.Tensor], **options: Any) -> dict[str, str]:
    quantize_and_export(
        source, export_dir=out, calib_data=batches, **{"progress": False, **options}
    )
    return hashes(out)


def in_parts(job: Job, *args: Any, **options: Any) -> Schedule:
    """Two layers at a time, with three experts at a time."""
    for plan in job.plans.values():
        split_layers(plan, job.model, 3)
    assert any(unit.parent for unit in job.plan.units)
    return Schedule(units=job.unit_bytes()[1])


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

    with monkeypatch.context() as patch:
        patch.setattr("modelopt_lite.request.make_schedule", in_parts)
        assert streamed == run(source, tmp_path / "d", token_batches, recipe=recipe)

    def loop(model: Any) -> None:
        for batch in token_batches:
            model(batch)

    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    quantize(model, recipe, loop)
    export_hf(model, tmp_path / "e", source=source)
    assert weights(streamed) == weights(hashes(tmp_path / "e"))


def test_resumed_report(
    checkpoint: MakeCheckpoint, token_batches: list[torch.Tensor], tmp_path: Path
) -> None:
    """The amax of smoothed inputs survives an interruption."""
    source = checkpoint("mixtral")

    def export(out: Path) -> Report:
        return quantize_and_export(
            source,
            export_dir=out,
            calib_data=token_batches,
            recipe="nvfp4_awq_lite",
            progress=False,
        )

    whole = export(tmp_path / "a")

    def stop(phase: str, done: int, total: int) -> None:
        if phase.endswith("layers.1"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(source, tmp_path / "b", token_batches, recipe="nvfp4_awq_lite", progress=stop)
    resumed = export(tmp_path / "b")
    assert resumed.input_amax == whole.input_amax
    assert resumed.relative_errors == whole.relative_errors


DIALECTS = ("modelopt", "compressed-tensors")


@pytest.mark.parametrize(
    ("weights", "method"), [("nvfp4", "awq_lite"), ("int8", "smoothquant"), ("nvfp4", "gptq")]
)
def test_several_dialects(
    weights: str,
    method: str,
    checkpoint: MakeCheckpoint,
    token_batches: list[torch.Tensor],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One search serves both, each as alone; streamed, in parts, and after an interruption."""
    recipe = Recipe(
        name="folded",
        weights=weights,
        algorithm=AlgorithmChoice(method=method, options=METHODS[method]),
        exclude=("*.o_proj",),
    )
    source = checkpoint("qwen3_moe")
    alone = {
        name: run(source, tmp_path / name, token_batches, recipe=recipe, dialect=name)
        for name in DIALECTS
    }

    def stop(phase: str, done: int, total: int) -> None:
        if phase.endswith("layers.0"):
            raise KeyboardInterrupt

    out = tmp_path / "both"
    options: dict[str, Any] = {"recipe": recipe, "dialect": DIALECTS}
    with pytest.raises(KeyboardInterrupt, match="run the same again"):
        run(source, out, token_batches, progress=stop, **options)
    monkeypatch.setattr("modelopt_lite.request.make_schedule", in_parts)
    quantize_and_export(source, export_dir=out, calib_data=token_batches, progress=False, **options)
    assert {name: hashes(out / name) for name in DIALECTS} == alone


def test_a_search_without_data(checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    """From tensor to tensor, and with the model."""
    recipe = Recipe(
        name="searched",
        weights="w4a16_nvfp4",
        algorithm=AlgorithmChoice(method="mse", options=METHODS["mse"]),
    )
    source = checkpoint("qwen3_moe")
    quantize_and_export(source, export_dir=tmp_path / "a", recipe=recipe, progress=False)
    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    quantize(model, recipe)
    export_hf(model, tmp_path / "b", source=source)
    assert weights(hashes(tmp_path / "a")) == weights(hashes(tmp_path / "b"))


def test_a_dialect_without_scales_of_channels_refuses_them(
    checkpoint: MakeCheckpoint, token_batches: list[torch.Tensor], tmp_path: Path
) -> None:
    source, out = checkpoint("qwen3_moe"), tmp_path / "out"
    options = {"recipe": "nvfp4_awq_lite", "dialect": "compressed-tensors"}
    with pytest.raises(RecipeError, match=r"o_proj.*no tensor for scales of the channels"):
        run(source, out, token_batches, **options)
    assert not out.exists()


def test_a_layer_that_runs_twice_is_refused() -> None:
    statistics = Statistics(["channels"])
    site = Site("layer.weight")
    statistics.visit(site, torch.ones(2, 3), False)
    statistics.drop([site])
    with pytest.raises(CalibrationError, match="runs more than once"):
        statistics.visit(site, torch.ones(2, 3), False)
