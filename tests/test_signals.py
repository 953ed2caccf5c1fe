"""Signals, as a shell or a scheduler sends them, in every phase of what takes long.

Afterwards the source is untouched, there is a whole result or none, what was said of it is true,
and the same command goes on, to the same bytes.
"""

from __future__ import annotations

import hashlib
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from signalled import Moment, command

from modelopt_lite.report import OF_THE_RUN

MakeCheckpoint = Callable[..., Path]
DATA_FREE = "fp8_per_channel_per_token"
AUTO = "auto_quantize:\n  formats: [nvfp4, fp8]\n  effective_bits: 5.0\n  method: {}\n"
ENDING = (signal.SIGTERM, signal.SIGKILL)


def hashes(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name not in OF_THE_RUN
    }


@pytest.fixture
def ids(tmp_path: Path) -> Path:
    """A file of token ids, below a vocabulary of 64."""
    path = tmp_path / "ids.safetensors"
    generator = torch.Generator().manual_seed(1)
    save_file({"ids": torch.randint(3, 64, (20, 16), generator=generator)}, path)
    return path


class Setting:
    """A source, what it should become, and a folder for the export ``out`` alone."""

    def __init__(self, source: Path, base: Path, *options: str | Path) -> None:
        self.source, self.before, self.options = source, hashes(source), options
        self.told = base / "told"
        self.folder = base / "exports"
        self.folder.mkdir()
        self.out = self.folder / "out"
        assert self.run(base / "whole") == 0, self.told.read_text()
        self.wanted = hashes(base / "whole")

    def run(self, out: Path, at: Moment | None = None, sent: int = 0) -> int:
        given = ["quantize", self.source, "-o", out, "--no-progress", *self.options]
        return command(given, self.told, at, sent)[0]

    def check(self, at: Moment, sent: signal.Signals, left: set[str], said: str) -> None:
        """Send a signal, look at what is there, and go on.

        Args:
            at: When it comes.
            sent: The signal.
            left: What there is beside the export's place, unless the process was killed.
            said: Of the message.
        """
        ended = self.run(self.out, at, sent)
        told = self.told.read_text()
        assert ended == (-sent if sent is signal.SIGKILL else 130), told
        assert hashes(self.source) == self.before
        assert not self.out.exists()
        if sent is not signal.SIGKILL:
            assert said in told
            assert "Traceback" not in told
            assert {path.name for path in self.folder.iterdir()} == left
        assert self.run(self.out) == 0, self.told.read_text()
        assert hashes(self.out) == self.wanted
        search = self.folder / "out-search"
        assert {path.name for path in self.folder.iterdir()} == {
            "out",
            *([search.name] if search.exists() else []),
        }
        assert {path.suffix for path in search.glob("*")} <= {".json", ".yaml"}


NOTHING: set[str] = set()
GONE = "interrupted; nothing was left behind"
PARTIAL = ".out.partial; run the same again to go on"
RUN: dict[Moment, tuple[set[str], str]] = {
    Moment("modelopt_lite.api:_write"): (NOTHING, GONE),
    # On the thread that writes, which notes what it was given before the run ends.
    Moment("modelopt_lite.resume:UnitLog._note"): ({".out.partial"}, PARTIAL),
    Moment("modelopt_lite.run:write_configs"): ({".out.partial"}, PARTIAL),
    Moment("modelopt_lite.run:copy_sidecars"): ({".out.partial"}, PARTIAL),
    Moment("modelopt_lite.run:audit_or_raise"): ({".out.partial"}, PARTIAL),
    Moment("modelopt_lite.run:write_page"): ({".out.partial"}, PARTIAL),
    Moment("modelopt_lite.output:_replace"): ({".out.partial"}, PARTIAL),
}


@pytest.mark.parametrize("at", RUN, ids=str)
@pytest.mark.parametrize("sent", [*ENDING, signal.SIGINT])
def test_in_every_phase_of_a_run(
    checkpoint: MakeCheckpoint,
    tmp_path: Path,
    at: Moment,
    sent: signal.Signals,
) -> None:
    setting = Setting(checkpoint("llama"), tmp_path, "--recipe", DATA_FREE)
    setting.check(at, sent, *RUN[at])


LOSSES = "modelopt_lite.calibrate.awq:_losses"


@pytest.mark.parametrize(
    ("algorithm", "at"),
    [
        ("awq_lite", Moment(LOSSES)),
        ("awq_lite", Moment(LOSSES, 6)),
        ("gptq", Moment("modelopt_lite.calibrate.gptq:GPTQ._choice", 6)),
    ],
    ids=str,
)
@pytest.mark.parametrize("sent", ENDING)
def test_in_searches_for_scales(
    checkpoint: MakeCheckpoint,
    ids: Path,
    tmp_path: Path,
    algorithm: str,
    at: Moment,
    sent: signal.Signals,
) -> None:
    recipe = tmp_path / "searched.yaml"
    recipe.write_text(f"weights: nvfp4\nalgorithm: {algorithm}\n")
    options = ("--recipe", recipe, "--calib-data", ids)
    # The embeddings are finished before the first layer is searched.
    left = {".out.partial"}
    Setting(checkpoint("llama"), tmp_path, *options).check(at, sent, left, PARTIAL)


SEARCH = {"out-search"}
GO_ON = "out-search; run the same again to go on"
GRADIENT = "modelopt_lite.auto.resume:SearchLog.add"
VARIANT = "modelopt_lite.auto.variant_log:VariantLog.finish"
WRITE = "modelopt_lite.auto.search:Search._write"
CHOSEN = "run the same again; the formats that were chosen stay in "


@pytest.mark.parametrize(
    ("method", "at", "left", "said"),
    [
        ("gradient", Moment("modelopt_lite.auto.gradient:_forward"), NOTHING, GONE),
        ("gradient", Moment(GRADIENT), NOTHING, GONE),
        ("gradient", Moment(GRADIENT, 2), SEARCH, GO_ON),
        ("gradient", Moment(WRITE), SEARCH, GO_ON),
        ("gradient", Moment("modelopt_lite.api:_write"), SEARCH, CHOSEN),
        ("kl", Moment(VARIANT), NOTHING, GONE),
        ("kl", Moment(VARIANT, 2), SEARCH, GO_ON),
    ],
    ids=str,
)
@pytest.mark.parametrize("sent", ENDING)
def test_in_searches_for_formats(
    checkpoint: MakeCheckpoint,
    ids: Path,
    tmp_path: Path,
    method: str,
    at: Moment,
    left: set[str],
    said: str,
    sent: signal.Signals,
) -> None:
    recipe = tmp_path / "mixed.yaml"
    recipe.write_text(AUTO.format(method))
    options = ("--recipe", recipe, "--calib-data", ids)
    Setting(checkpoint("llama"), tmp_path, *options).check(at, sent, left, said)


@pytest.mark.parametrize("sent", ENDING)
def test_in_an_evaluation_that_keeps_predictions(
    checkpoint: MakeCheckpoint, ids: Path, tmp_path: Path, sent: signal.Signals
) -> None:
    """Those of an earlier model stay, all of them; a folder that was made goes."""
    first, told, kept = checkpoint("llama"), tmp_path / "told", tmp_path / "kept"
    second = checkpoint("qwen3_moe")
    at = Moment("modelopt_lite.predictions:Predictions.keep", 2)

    def run(source: Path, *given: str | Path, killed: bool = False) -> str:
        options = ("--text", ids, "--no-progress", "--batch-size", "4", *given)
        status, said = command(["eval", source, *options], told, at if killed else None, sent)
        assert status == ((130 if sent is signal.SIGTERM else -sent) if killed else 0), said
        return said

    said = run(first, "--keep", kept, killed=True)
    if sent is signal.SIGTERM:
        assert GONE in said
        assert not kept.exists()
    run(first, "--keep", kept)
    assert len(load_file(kept / "batch-00000.safetensors")["logits"]) == 4
    before = hashes(kept)
    assert len(before) == 5
    run(second, "--keep", kept, killed=True)
    assert {name: h for name, h in hashes(kept).items() if not name.endswith(".part")} == before
    assert (hashes(kept) == before) == (sent is signal.SIGTERM)
    zero = run(first, "--against", kept, "--keep", kept)
    assert "kl" in zero
    assert " 0.0000" in zero
    assert hashes(kept) == before
