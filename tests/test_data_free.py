"""Recipes without calibration: no model, no transformers, and the same bytes however they run."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from modelopt_lite import quantize_and_export
from modelopt_lite.build import build_meta_model
from modelopt_lite.checkpoint.dequant import open_source
from modelopt_lite.checkpoint.journal import JOURNAL, has_entries
from modelopt_lite.checkpoint.reader import Checkpoint
from modelopt_lite.errors import NonFiniteError, OutputError
from modelopt_lite.job import Job, prepare
from modelopt_lite.naming import UnclearNamesError
from modelopt_lite.recipes import load_recipe
from modelopt_lite.report import OF_THE_RUN, Report

MakeCheckpoint = Callable[..., Path]
ROOT = Path(__file__).parent.parent
KINDS = ("llama_tied", "qwen3_moe", "gpt_oss", "deepseek_v3")


def hashes(folder: Path) -> dict[str, str]:
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.iterdir())
        if path.name not in OF_THE_RUN
    }


def run(source: Path, out: Path, recipe: str = "w4a16_nvfp4", **options: Any) -> Report:
    options = {"progress": False, "on_bad_shape": "skip", **options}
    return quantize_and_export(source, export_dir=out, recipe=recipe, **options)


@pytest.fixture
def small_units(monkeypatch: pytest.MonkeyPatch) -> None:
    """A unit is a single tensor, or those that share a scale."""
    monkeypatch.setattr("modelopt_lite.job.UNIT_BYTES", 1)
    monkeypatch.setattr("modelopt_lite.data_free.UNIT_BYTES", 1)


def job_of(folder: Path, recipe: str) -> Job:
    return prepare(
        folder,
        load_recipe(recipe),
        model_type=None,
        numerics="exact",
        on_bad_shape="skip",
        trust_remote_code=False,
        device="cpu",
    )


# --- units


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("recipe", ["w4a16_nvfp4", "int8_weight_only"])
@pytest.mark.usefixtures("small_units")
def test_units_are_what_shares_scales_in_the_order_on_disk(
    recipe: str, kind: str, checkpoint: MakeCheckpoint
) -> None:
    job = job_of(checkpoint(kind), recipe)
    plan, tensors = job.plan, list(job.source.tensors)
    entries = [entry for unit in plan.units for entry in unit.entries]
    assert sorted(entries) == sorted(tensors)
    assert [tensors.index(unit.entries[0]) for unit in plan.units] == sorted(
        tensors.index(unit.entries[0]) for unit in plan.units
    )
    of_group: dict[str, set[str]] = {}
    for m in plan.matrices:
        of_group.setdefault(m.weight_group, set()).add(m.unit)
    assert all(len(units) == 1 for units in of_group.values())
    shared = {m.source for m in plan.matrices if m.weight_group != m.name}
    assert {e for unit in plan.units if len(unit.entries) > 1 for e in unit.entries} == shared
    assert shared or recipe == "int8_weight_only"
    job.source.close()


# --- the same bytes


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_bytes_with_the_model_and_without(
    kind: str, checkpoint: MakeCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = checkpoint(kind)
    recipes = (
        *("w4a16_nvfp4", "mxfp4", "fp8_per_channel_per_token"),
        *("int8_per_channel_per_token", "int8_weight_only"),
    )
    for recipe in recipes:
        run(source, tmp_path / recipe, recipe)

    def unclear(*args: Any, **kwargs: Any) -> None:
        raise UnclearNamesError("for a test")

    monkeypatch.setattr("modelopt_lite.job.read_names", unclear)
    for recipe in recipes:
        report = run(source, tmp_path / f"{recipe}-model", recipe)
        assert "planned by the model in the installed transformers: for a test" in report.notes
        assert hashes(tmp_path / recipe) == hashes(tmp_path / f"{recipe}-model")


@pytest.mark.usefixtures("small_units")
def test_the_same_bytes_with_one_worker_and_four(
    checkpoint: MakeCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = checkpoint("qwen3_moe")
    reports = {}
    for workers in (1, 4):
        monkeypatch.setattr("modelopt_lite.run.quantizer_count", lambda _, w=workers: w)
        reports[workers] = run(source, tmp_path / str(workers))
    assert hashes(tmp_path / "1") == hashes(tmp_path / "4")
    assert list(reports[1].relative_errors.items()) == list(reports[4].relative_errors.items())


def test_the_same_bytes_whatever_the_unit(
    checkpoint: MakeCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = checkpoint("mixtral")
    for size in (1, 10_000, 1 << 24):
        monkeypatch.setattr("modelopt_lite.job.UNIT_BYTES", size)
        run(source, tmp_path / str(size), max_shard_size=50_000)
    assert hashes(tmp_path / "1") == hashes(tmp_path / "10000") == hashes(tmp_path / str(1 << 24))


@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss"])
def test_every_byte_is_read_once(
    kind: str, checkpoint: MakeCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of the run's reads; the audit reads headers of the source alone."""
    sources: list[Checkpoint] = []

    def opening(*args: Any) -> Any:
        sources.append(open_source(*args))  # type: ignore[arg-type]
        return sources[-1]

    monkeypatch.setattr("modelopt_lite.job.open_source", opening)
    report = run(checkpoint(kind), tmp_path / "out")
    (source,) = sources
    assert set(source.reads.values()) == {1}
    assert source.reads.keys() == source.tensors.keys()
    assert report.bytes_read == source.total_bytes


# --- interrupted


class Interrupt:
    """Raises at one unit; notes the units until then."""

    def __init__(self, after: int = 10**6) -> None:
        self.units: list[str] = []
        self.after = after

    def __call__(self, phase: str, done: int, total: int) -> None:
        self.units.append(phase)
        assert done <= total
        if len(self.units) == self.after:
            raise KeyboardInterrupt


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.usefixtures("small_units")
def test_goes_on_behind_what_is_finished(
    workers: int, checkpoint: MakeCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("modelopt_lite.run.quantizer_count", lambda _: workers)
    source = checkpoint("llama")
    whole = Interrupt()
    unbroken = run(source, tmp_path / "a", progress=whole)
    seen: list[str] = []
    stops = []
    for after in (1, 2, 3, 10**6):
        stop = Interrupt(after)
        stops.append(stop)
        if after < 10**6:
            with pytest.raises(KeyboardInterrupt, match="run the same again"):
                run(source, tmp_path / "b", progress=stop)
            assert has_entries(tmp_path / ".b.partial")
        else:
            report = run(source, tmp_path / "b", progress=stop)
        seen += stop.units
    assert hashes(tmp_path / "a") == hashes(tmp_path / "b")
    assert sorted(set(seen)) == sorted(whole.units)
    assert all(len(set(a.units) & set(b.units)) <= 1 for a in stops for b in stops if a is not b)
    assert report.bytes_read < unbroken.bytes_read
    assert report.relative_errors == unbroken.relative_errors
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.usefixtures("small_units")
def test_a_disk_that_fills_up_again_and_again(
    workers: int, checkpoint: MakeCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Full after so many writes, resumes included: each run goes on where the one before ended."""
    monkeypatch.setattr("modelopt_lite.run.quantizer_count", lambda _: workers)
    source = checkpoint("qwen3_moe")
    run(source, tmp_path / "a")
    real, room = os.pwrite, 0

    def pwrite(fd: int, data: Any, offset: int) -> int:
        nonlocal room
        if not room:
            raise OSError(errno.ENOSPC, "No space left on device")
        room -= 1
        return real(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", pwrite)
    finished = []
    for more in (40, 40, 40, 10**6):
        room = more
        if more < 10**6:
            with pytest.raises(OutputError, match=r"are free .*what is finished stays"):
                run(source, tmp_path / "b")
            journal = tmp_path / ".b.partial" / JOURNAL / "journal.jsonl"
            finished.append(journal.read_bytes().count(b"\n"))
        else:
            run(source, tmp_path / "b")
    assert finished[0] < finished[1] < finished[2]
    assert hashes(tmp_path / "a") == hashes(tmp_path / "b")
    assert not list(tmp_path.glob(".*"))


@pytest.mark.usefixtures("small_units")
def test_a_damaged_value_ends_the_run_and_leaves_nothing(
    checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    source = checkpoint("llama")
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 4] = torch.nan
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    with pytest.raises(NonFiniteError, match=r"layers\.1\.mlp\.up_proj"):
        run(source, tmp_path / "b")
    assert not list(tmp_path.glob("*b*"))


# --- without transformers


def test_transformers_is_never_imported(checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    """Planned, run, audited and planned again where it cannot be imported at all."""
    code = f"""
import json, sys
for name in ("transformers", "accelerate", "tokenizers"):
    sys.modules[name] = None  # an import raises
from modelopt_lite import dry_run, quantize_and_export
from modelopt_lite.verify.audit import audit
source, out = {str(checkpoint("qwen3_moe"))!r}, {str(tmp_path / "out")!r}
options = dict(export_dir=out, recipe="w4a16_nvfp4", kv_cache="fp8_cast")
plan = dry_run(source, **options)
report = quantize_and_export(source, progress=False, **options)
found = [f.rule for f in audit(out, source=source, deep=True) if f.severity == "error"]
again = dry_run(source, **options)
print(json.dumps([plan["problems"], len(plan["units"]), found, again["reuses_export"]]))
"""
    made = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert made.returncode == 0, made.stderr
    assert json.loads(made.stdout.splitlines()[-1]) == [[], 1, [], True]


def test_the_command_line_plans_without_transformers(checkpoint: MakeCheckpoint) -> None:
    code = (
        "import sys; sys.modules['transformers'] = None; from modelopt_lite.cli import main; main()"
    )
    arguments = ["plan", str(checkpoint("llama")), "--recipe", "fp8_per_channel_per_token"]
    made = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False
    )
    assert made.returncode == 0, made.stderr
    assert "14 of 15 linear layers" in made.stdout


def test_a_calibrated_recipe_still_has_the_model(checkpoint: MakeCheckpoint) -> None:
    folder = checkpoint("llama")
    job = job_of(folder, "fp8")
    assert job.model is not None
    assert not job.plan.by_tensor
    assert type(job.model) is type(
        build_meta_model(folder, job.source.config, trust_remote_code=False)
    )
    job.source.close()
