"""Whatever happens to one rank, all end in time, with its error and its number."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import ranks
import torch
from breaking import breaking, dying_first, impatient, other_seed
from ranks import Ended, start, wait

import modelopt_lite.api

MakeCheckpoint = Callable[..., Path]
pytestmark = pytest.mark.dist


@pytest.fixture(scope="module", autouse=True)
def imported() -> None:
    """Have all imported that ranks begin with: no run has to wait for it."""
    wait(start(1, int))


def broken(
    what: str,
    source: Path,
    out: Path,
    batches: list[torch.Tensor],
    unit: str = "model.layers.0",
) -> tuple[list[Ended], float]:
    """Return how two ranks ended, and after how many seconds."""
    begun = time.monotonic()
    started = start(2, breaking, what, source, out, batches, unit)
    ends = wait(started[:1], 60)
    seconds = time.monotonic() - begun
    for process, _ in started[1:]:
        if what == "stopped":
            process.kill()
    return ends + wait(started[1:], 60), seconds


@pytest.mark.parametrize(
    ("what", "unit"),
    [("killed", "model.layers.1"), ("raises", "model.layers.1"), ("full", "model.layers.0")],
)
def test_a_rank_breaks(
    what: str,
    unit: str,
    checkpoint: MakeCheckpoint,
    token_batches: list[torch.Tensor],
    tmp_path: Path,
) -> None:
    out = tmp_path / "out"
    (first, second), seconds = broken(what, checkpoint("mixtral"), out, token_batches, unit)
    assert seconds < 30
    words = {
        "killed": ["RankError: rank 1 ended without a word", "killed"],
        "raises": ["RankError: rank 1 failed", "tensor 'x' holds a NaN [MOL410]"],
        "full": ["rank 1 failed", "No space left on device", "[MOL500]"],
    }[what]
    assert first.error is not None
    assert all(word in first.error for word in words), first.error
    if what == "killed":
        assert second.exitcode == -signal.SIGKILL
    else:
        assert second.error is not None
        assert not second.error.startswith("RankError")  # its own error
    assert not out.exists()
    # What is wrong with the inputs leaves nothing; else a later run can go on.
    left = list(tmp_path.glob(".out*"))
    assert len(left) == (what != "raises")


def test_a_rank_that_hangs(
    checkpoint: MakeCheckpoint,
    token_batches: list[torch.Tensor],
    tmp_path: Path,
) -> None:
    (first, _), seconds = broken("stopped", checkpoint("mixtral"), tmp_path / "out", token_batches)
    assert seconds < 45  # those of the model, and those of silence
    assert first.error is not None
    assert "rank 1 ended without a word (no sign of life for 20 s)" in first.error


def test_first_rank_is_killed(
    checkpoint: MakeCheckpoint, token_batches: list[torch.Tensor], tmp_path: Path
) -> None:
    source, out = checkpoint("mixtral"), tmp_path / "out"
    started = start(2, dying_first, source, out, token_batches)
    first, second = wait(started, 60)
    assert first.exitcode == -signal.SIGKILL
    assert second.error is not None
    assert "rank 0" in second.error
    assert not out.exists()


@pytest.mark.parametrize("missing", [0, 1])
def test_a_rank_never_starts(
    missing: int, checkpoint: MakeCheckpoint, token_batches: list[torch.Tensor], tmp_path: Path
) -> None:
    source, out = checkpoint("mixtral"), tmp_path / "out"
    begun = time.monotonic()
    [left] = wait(start(2, impatient, source, out, token_batches, missing=[missing]), 60)
    assert time.monotonic() - begun < 30
    assert left.error is not None
    assert left.error.startswith("RankError")
    assert ("rank 0 never started" if missing == 0 else "never started: 1") in left.error
    assert not list(tmp_path.glob("*out*"))


def test_ranks_with_other_inputs_are_refused(
    checkpoint: MakeCheckpoint, token_batches: list[torch.Tensor], tmp_path: Path
) -> None:
    source, out = checkpoint("mixtral"), tmp_path / "out"
    for ended in wait(start(2, other_seed, source, out, token_batches)):
        assert ended.error is not None
        assert "options.seed was 0 and is 1" in ended.error


# --- going on


@pytest.mark.parametrize(
    ("size", "unit"),
    [(1, "model.norm"), (2, "model.norm"), (4, "model.norm"), (4, "model.layers.0")],
)
def test_another_number_of_ranks_goes_on(
    size: int,
    unit: str,
    checkpoint: MakeCheckpoint,
    token_batches: list[torch.Tensor],
    tmp_path: Path,
) -> None:
    source, out = checkpoint("mixtral"), tmp_path / "out"
    whole = modelopt_lite.api.quantize_and_export(
        source,
        export_dir=tmp_path / "whole",
        recipe="fp8",
        calib_data=token_batches,
        progress=False,
    )
    broken("interrupted", source, out, token_batches, unit)
    [left] = tmp_path.glob(".out*")
    lines = (left / "journal" / "journal.jsonl").read_text().splitlines()[1:]
    noted = [json.loads(line)["unit"] for line in lines]
    assert ("model.layers.0" in noted) == (unit == "model.norm")
    if size == 1:
        reports = [ranks.quantize(source, out, token_batches, {"recipe": "fp8"})]
    else:
        reports = ranks.run_ranks(size, source, out, token_batches, recipe="fp8")
    assert reports[0].bytes_read < size * whole.bytes_read
    for path in (tmp_path / "whole").glob("*.safetensors"):
        assert path.read_bytes() == (out / path.name).read_bytes()
    assert reports[0].input_amax == whole.input_amax
    assert reports[0].relative_errors == whole.relative_errors
    assert reports[0].tokens_per_expert == whole.tokens_per_expert
    assert not list(tmp_path.glob(".out*"))
