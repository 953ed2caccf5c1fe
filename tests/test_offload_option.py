"""``offload=`` takes an `OffloadConfig` or an `OffloadPlan`: other schedules, the same bytes."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from modelopt_lite import Recipe, dry_run, quantize_and_export
from modelopt_lite.build import build_meta_model
from modelopt_lite.checkpoint import open_source
from modelopt_lite.cli import app
from modelopt_lite.errors import ModelOptLiteError, RecipeError
from modelopt_lite.offload import OffloadConfig
from modelopt_lite.offload.auto import plan_offload
from modelopt_lite.offload.store import WeightStore
from modelopt_lite.recipes.algorithms import METHODS, AlgorithmChoice
from modelopt_lite.report import OF_THE_RUN, REPORT_FILE, Report

MakeCheckpoint = Callable[..., Path]


def hashes(folder: Path) -> dict[str, str]:
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.iterdir())
        if path.name not in OF_THE_RUN
    }


def run(source: Path, out: Path, batches: Sequence[torch.Tensor], **options: Any) -> Report:
    options = {"recipe": "nvfp4", "progress": False, **options}
    return quantize_and_export(source, export_dir=out, calib_data=batches, **options)


CONFIGS = {
    "all": OffloadConfig(),
    "layers": OffloadConfig(include_patterns=["model.layers.*"]),
    "first layer": OffloadConfig(include_patterns=["name:model.layers.0"]),
    "but the last": OffloadConfig(exclude_patterns=["model.layers.1.**", "model.layers.1.*"]),
    "off": OffloadConfig(enabled=False),
    "timing": OffloadConfig(num_blocks=6, profiling_iters=2, pinned_memory=False),
}


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("kind", ["llama_tied", "qwen3_moe"])
def test_same_bytes(
    name: str,
    kind: str,
    checkpoint: MakeCheckpoint,
    token_batches: list[torch.Tensor],
    tmp_path: Path,
) -> None:
    source = checkpoint(kind)
    run(source, tmp_path / "a", token_batches)
    report = run(source, tmp_path / "b", token_batches, offload=CONFIGS[name])
    assert hashes(tmp_path / "b") == hashes(tmp_path / "a")
    ignored = [note for note in report.notes if "not for a run" in note]
    expected = ["pinned_memory, profiling_iters, num_blocks"] if name == "timing" else []
    assert [note.rpartition(": ")[2] for note in ignored] == expected


@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral"])
def test_a_plan_keeps_its_budget(
    kind: str,
    checkpoint: MakeCheckpoint,
    token_batches: list[torch.Tensor],
    tmp_path: Path,
) -> None:
    source = checkpoint(kind)
    run(source, tmp_path / "a", token_batches)
    opened = open_source(source)
    model = build_meta_model(source, opened.config, trust_remote_code=False)
    whole = plan_offload(model)
    budget = whole.resident_bytes + 3 * max(whole.units.values())
    plan = plan_offload(model, budget=budget)
    described = dry_run(source, recipe="nvfp4", calib_data=token_batches, offload=plan)
    assert described["budgets"]["weights"] == budget
    parts = described["predicted"]
    assert (parts["host_parts"] | parts["device_parts"])["weights"] <= budget
    run(source, tmp_path / "b", token_batches, offload=plan)
    assert hashes(tmp_path / "b") == hashes(tmp_path / "a")


def test_a_budget_that_cannot_be_met_is_refused(
    checkpoint: MakeCheckpoint, token_batches: list[torch.Tensor], tmp_path: Path
) -> None:
    config = OffloadConfig(max_gpu_mem_fraction=1e-9)
    with pytest.raises(RecipeError, match=r"budget of weights is .* bytes, and the smallest that"):
        run(checkpoint("llama"), tmp_path / "b", token_batches, offload=config)


class Reads:
    """Notes which units are loaded."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.names: list[str] = []
        load = WeightStore.load

        def noting(store: WeightStore, unit: Any) -> Any:
            self.names.append(unit.name)
            return load(store, unit)

        monkeypatch.setattr(WeightStore, "load", noting)


def test_what_stays_is_counted_and_read_once(
    checkpoint: MakeCheckpoint,
    token_batches: list[torch.Tensor],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = checkpoint("llama", num_hidden_layers=4)
    weights = []
    for config in (OffloadConfig(), CONFIGS["first layer"]):
        described = dry_run(source, recipe="nvfp4", calib_data=token_batches, offload=config)
        weights.append(described["predicted"]["host_parts"]["weights"])
    assert weights[1] > weights[0]
    reads = Reads(monkeypatch)
    run(source, tmp_path / "b", token_batches, offload=CONFIGS["first layer"])
    assert len(set(reads.names)) == len(reads.names)


@pytest.mark.parametrize("after", [1, 2, 3])
def test_resumed_with_layers_that_stay(
    after: int, checkpoint: MakeCheckpoint, token_batches: list[torch.Tensor], tmp_path: Path
) -> None:
    source = checkpoint("qwen3_moe", num_hidden_layers=4)
    run(source, tmp_path / "a", token_batches)
    config = OffloadConfig(include_patterns=["name:model.layers.0", "name:model.layers.2"])
    layers: list[str] = []

    def stop(phase: str, done: int, total: int) -> None:
        layers.extend([phase] * (".layers." in phase))
        if len(layers) == after:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt, match="to go on"):
        run(source, tmp_path / "b", token_batches, offload=config, progress=stop)
    seen: list[str] = []
    run(
        source,
        tmp_path / "b",
        token_batches,
        offload=config,
        progress=lambda phase, done, total: seen.append(phase),
    )
    assert hashes(tmp_path / "b") == hashes(tmp_path / "a")
    assert not set(seen) & set(layers)


def test_sequential_recipes_keep_none(
    checkpoint: MakeCheckpoint, token_batches: list[torch.Tensor], tmp_path: Path
) -> None:
    source = checkpoint("llama")
    recipe = Recipe(
        name="mine",
        weights="nvfp4",
        algorithm=AlgorithmChoice(method="gptq", options=METHODS["gptq"]),
    )
    run(source, tmp_path / "a", token_batches, recipe=recipe)
    report = run(
        source, tmp_path / "b", token_batches, recipe=recipe, offload=CONFIGS["first layer"]
    )
    assert hashes(tmp_path / "b") == hashes(tmp_path / "a")
    assert any("none stays" in note for note in report.notes)


@pytest.mark.parametrize(
    ("offload", "words"),
    [
        ("most", 'must be "auto", "none", an OffloadConfig'),
        (OffloadConfig(shm_enabled=True, shm_namespace="x"), "shm_enabled=True"),
        (OffloadConfig(include_patterns=["model.layer.*"]), "model.layer"),
    ],
)
def test_refused(
    offload: Any,
    words: str,
    checkpoint: MakeCheckpoint,
    token_batches: list[torch.Tensor],
    tmp_path: Path,
) -> None:
    with pytest.raises(ModelOptLiteError, match=words):
        run(checkpoint("llama"), tmp_path / "b", token_batches, offload=offload)
    assert list(tmp_path.glob("*b*")) == []


def test_from_a_file(
    checkpoint: MakeCheckpoint, token_batches: list[torch.Tensor], tmp_path: Path
) -> None:
    source, path, ids = checkpoint("llama"), tmp_path / "offload.yaml", tmp_path / "ids.safetensors"
    from safetensors.torch import save_file

    save_file({"input_ids": token_batches[0]}, ids)
    path.write_text("include_patterns: [model.layers.*]\nnum_blocks: 7\n")
    arguments = ["quantize", str(source), "--calib-data", str(ids), "--no-progress"]
    for out, more in (("a", []), ("b", ["--offload-config", str(path)])):
        done = CliRunner().invoke(app, [*arguments, "-o", str(tmp_path / out), *more])
        assert done.exit_code == 0, done.output
    assert hashes(tmp_path / "b") == hashes(tmp_path / "a")
    assert "num_blocks" in (tmp_path / "b" / REPORT_FILE).read_text()
    path.write_text("include_pattern: [a]\n")
    done = CliRunner().invoke(
        app, [*arguments, "-o", str(tmp_path / "c"), "--offload-config", str(path)]
    )
    assert done.exit_code != 0
    assert "include_patterns" in done.stderr
