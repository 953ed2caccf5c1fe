"""A run that was interrupted goes on, repeats at most one unit, and ends with the same bytes."""

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

from modelopt_lite import quantize_and_export
from modelopt_lite.checkpoint.journal import Journal, difference, has_entries
from modelopt_lite.errors import NonFiniteError, OutputError
from modelopt_lite.offload.replay import StepWriter
from modelopt_lite.report import OF_THE_RUN, Report

MakeCheckpoint = Callable[..., Path]
KINDS = ("llama", "llama_tied", "qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss", "gemma3_text")


def hashes(folder: Path) -> dict[str, str]:
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.iterdir())
        if path.name not in OF_THE_RUN
    }


def run(source: Path, out: Path, batches: list[torch.Tensor], **options: Any) -> Report:
    options = {"recipe": "nvfp4", "progress": False, **options}
    return quantize_and_export(source, export_dir=out, calib_data=batches, **options)


class Interrupt:
    """Raises when so many layers were exported; notes the layers until then."""

    def __init__(self, after: int = 10**6, error: type[BaseException] = KeyboardInterrupt) -> None:
        self.layers: list[str] = []
        self.after = after
        self.error = error

    def __call__(self, phase: str, done: int, total: int) -> None:
        if ".layers." in phase:
            self.layers.append(phase)
            if len(self.layers) == self.after:
                raise self.error("stop")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("after", [1, 2])
def test_goes_on_behind_what_is_finished(
    kind: str,
    after: int,
    checkpoint: MakeCheckpoint,
    token_batches: list[torch.Tensor],
    tmp_path: Path,
) -> None:
    source = checkpoint(kind)
    kv_cache = "fp8" if kind != "gpt_oss" else None
    whole = Interrupt()
    unbroken = run(source, tmp_path / "a", token_batches, kv_cache=kv_cache, progress=whole)
    first, second = Interrupt(after), Interrupt()
    out = tmp_path / "b"
    with pytest.raises(KeyboardInterrupt, match="run the same again"):
        run(source, out, token_batches, kv_cache=kv_cache, progress=first)
    assert not out.exists()
    assert has_entries(tmp_path / ".b.partial")
    resumed = run(source, out, token_batches, kv_cache=kv_cache, progress=second)
    assert hashes(out) == hashes(tmp_path / "a")
    repeated = set(first.layers) & set(second.layers)
    assert len(repeated) <= 1
    assert sorted({*first.layers, *second.layers}) == sorted(whole.layers)
    assert resumed.bytes_read < unbroken.bytes_read
    for name in ("relative_errors", "input_amax", "tokens_per_expert", "cold_experts"):
        assert getattr(resumed, name) == getattr(unbroken, name), name
    assert [path.name for path in tmp_path.glob(".*")] == []


def test_interrupted_again_and_again(
    checkpoint: MakeCheckpoint, token_batches: list[torch.Tensor], tmp_path: Path
) -> None:
    source = checkpoint("qwen3_moe", num_hidden_layers=5)
    whole = Interrupt()
    run(source, tmp_path / "a", token_batches, progress=whole)
    seen: list[str] = []
    for _ in range(20):
        stop = Interrupt(2)
        try:
            run(source, tmp_path / "b", token_batches, progress=stop)
        except KeyboardInterrupt:
            seen += stop.layers
            continue
        seen += stop.layers
        break
    assert hashes(tmp_path / "a") == hashes(tmp_path / "b")
    assert len(seen) < 2 * len(whole.layers)


def test_changed_inputs_are_refused_by_name(
    checkpoint: MakeCheckpoint, token_batches: list[torch.Tensor], tmp_path: Path
) -> None:
    source, out = checkpoint("llama"), tmp_path / "b"
    with pytest.raises(KeyboardInterrupt):
        run(source, out, token_batches, progress=Interrupt(1))
    with pytest.raises(OutputError, match=r"recipe\.name was 'nvfp4' and is 'fp8'.*resume=False"):
        run(source, out, token_batches, recipe="fp8")
    with pytest.raises(OutputError, match=r"calibration\..* was .* and is"):
        run(source, out, token_batches[:1])
    assert has_entries(tmp_path / ".b.partial")  # what is finished is still there
    run(source, out, token_batches[:1], resume=False)
    run(source, tmp_path / "a", token_batches[:1])
    assert hashes(out) == hashes(tmp_path / "a")
    assert not (tmp_path / ".b.partial").exists()


def test_a_full_disk_keeps_what_is_finished(
    checkpoint: MakeCheckpoint, token_batches: list[torch.Tensor], tmp_path: Path
) -> None:
    source = checkpoint("llama")
    with pytest.raises(OutputError, match=r"stop; what is finished stays in .*\.b\.partial"):
        run(source, tmp_path / "b", token_batches, progress=Interrupt(1, OutputError))
    run(source, tmp_path / "b", token_batches)
    run(source, tmp_path / "a", token_batches)
    assert hashes(tmp_path / "b") == hashes(tmp_path / "a")


@pytest.mark.parametrize("after", [1, 2])
@pytest.mark.parametrize("where", ["journal", "outputs"])
def test_a_disk_that_fills_up_beside_the_export(
    where: str,
    after: int,
    checkpoint: MakeCheckpoint,
    token_batches: list[torch.Tensor],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In the journal, or in what layers return: what was noted before stays."""
    source = checkpoint("llama", num_hidden_layers=4)
    run(source, tmp_path / "a", token_batches)
    owner, name = (Journal, "add") if where == "journal" else (StepWriter, "finish")
    real, calls = getattr(owner, name), []

    def full(self: Any, *args: Any) -> Any:
        calls.append(args)
        if len(calls) <= after:
            return real(self, *args)
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", no_space)
            return real(self, *args)

    monkeypatch.setattr(owner, name, full)
    with pytest.raises(OutputError, match=r"No space left.*free some space.*what is finished stay"):
        run(source, tmp_path / "b", token_batches)
    monkeypatch.setattr(owner, name, real)
    again = Interrupt()
    run(source, tmp_path / "b", token_batches, progress=again)
    assert hashes(tmp_path / "b") == hashes(tmp_path / "a")
    assert len(again.layers) < 4


def no_space(fd: int) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("error", [NonFiniteError, ZeroDivisionError])
def test_other_errors_leave_nothing(
    error: type[Exception],
    checkpoint: MakeCheckpoint,
    token_batches: list[torch.Tensor],
    tmp_path: Path,
) -> None:
    with pytest.raises(error, match=r"^stop$"):
        run(checkpoint("llama"), tmp_path / "b", token_batches, progress=Interrupt(1, error))
    assert list(tmp_path.glob("*b*")) == []


def test_two_runs_into_one_folder(
    checkpoint: MakeCheckpoint, token_batches: list[torch.Tensor], tmp_path: Path
) -> None:
    source, out = checkpoint("llama"), tmp_path / "b"

    def nested(phase: str, done: int, total: int) -> None:
        with pytest.raises(OutputError, match=rf"another run \(process {os.getpid()}\) is writing"):
            run(source, out, token_batches)

    run(source, out, token_batches, progress=nested)
    assert out.exists()


def test_a_file_that_was_cut_is_noticed(
    checkpoint: MakeCheckpoint, token_batches: list[torch.Tensor], tmp_path: Path
) -> None:
    source, out = checkpoint("llama"), tmp_path / "b"
    with pytest.raises(KeyboardInterrupt):
        run(source, out, token_batches, progress=Interrupt(1))
    os.truncate(tmp_path / ".b.partial" / "export" / "model.safetensors", 100)
    with pytest.raises(OutputError, match=r"has 100 bytes, .*resume=False"):
        run(source, out, token_batches)


# --- killed


@pytest.mark.parametrize("recipe", ["nvfp4", "w4a16_nvfp4"])
def test_killed_at_any_moment(
    recipe: str, checkpoint: MakeCheckpoint, token_batches: list[torch.Tensor], tmp_path: Path
) -> None:
    """Twenty kill -9; see tests/helpers/killing.py."""
    source = checkpoint("qwen3_moe", num_hidden_layers=4)
    torch.save(token_batches, tmp_path / "batches.pt")
    script = Path(__file__).parent / "helpers" / "killing.py"
    command = [sys.executable, str(script), str(source), str(tmp_path), "20", recipe]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["runs"] == 20
    assert result["different"] == []
    assert result["resumed"] > 0  # some were killed when there was something to go on from
    assert result["repeated"] <= 1


# --- the journal


def test_a_cut_line_ends_the_journal(tmp_path: Path) -> None:
    journal = Journal(tmp_path, {"a": 1})
    journal.add({"unit": "x"})
    [path] = tmp_path.iterdir()
    whole = path.read_bytes()
    journal.add({"unit": "y"})
    for cut in range(len(whole), len(path.read_bytes())):
        data = path.read_bytes()
        path.write_bytes(data[:cut])
        assert Journal(tmp_path, {"a": 1}).entries == [{"unit": "x"}]
        assert path.read_bytes() == whole
        path.write_bytes(data)
    assert [e["unit"] for e in Journal(tmp_path, {"a": 1}).entries] == ["x", "y"]


def test_differences_are_named() -> None:
    assert difference({"a": {"b": 1}}, {"a": {"b": 2}}) == "a.b was 1 and is 2"
    assert difference({"inputs": {"b": 1}}, {"inputs": {}}) == "b was 1 and is None"
    assert difference({"x": 1}, {"x": 1, "y": [2]}) == "y was None and is [2]"
