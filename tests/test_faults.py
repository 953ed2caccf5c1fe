"""What may befall a run: afterwards the source is untouched, there is a whole export or none, and
the same run goes on or starts anew, to the same bytes."""

from __future__ import annotations

import errno
import hashlib
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from faults import Fault, failing_reads, failing_writes

from modelopt_lite import quantize_and_export
from modelopt_lite.errors import CheckpointError, ModelOptLiteError, OutputError
from modelopt_lite.report import OF_THE_RUN

MakeCheckpoint = Callable[..., Path]
DATA_FREE, CALIBRATED = "fp8_per_channel_per_token", "nvfp4"


def hashes(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name not in OF_THE_RUN
    }


class Setting:
    """A source, what it should become, and a place for exports."""

    def __init__(
        self, source: Path, folder: Path, batches: list[torch.Tensor], recipe: str
    ) -> None:
        self.source, self.folder, self.batches, self.recipe = source, folder, batches, recipe
        self.before = hashes(source)
        self.count = 0
        self.run(folder / "whole")
        self.wanted = hashes(folder / "whole")

    def run(self, out: Path, **options: Any) -> None:
        data = self.batches if self.recipe == CALIBRATED else None
        options = {"recipe": self.recipe, "calib_data": data, "progress": False, **options}
        quantize_and_export(self.source, export_dir=out, **options)

    def place(self) -> Path:
        """Return a folder in which nothing is, for an export ``out`` in it."""
        self.count += 1
        folder = self.folder / f"try-{self.count}"
        folder.mkdir()
        return folder / "out"

    def check(self, out: Path) -> None:
        """After a failure: the source as it was, no half export; then run to the end."""
        assert hashes(self.source) == self.before
        if out.exists():
            assert hashes(out) == self.wanted
        self.run(out)
        assert hashes(out) == self.wanted
        assert [path.name for path in out.parent.iterdir()] == ["out"]
        shutil.rmtree(out.parent)


@pytest.fixture(params=[DATA_FREE, CALIBRATED])
def setting(
    request: pytest.FixtureRequest,
    checkpoint: MakeCheckpoint,
    token_batches: list[torch.Tensor],
    tmp_path: Path,
) -> Setting:
    source = checkpoint("llama")
    (source / "tokenizer.json").write_text("{}")
    folder = tmp_path / "exports"
    folder.mkdir()
    return Setting(source, folder, token_batches, request.param)


def turns(count: int, most: int) -> Iterator[int]:
    """Yield up to ``most`` numbers below ``count``, spread over all, the last among them."""
    step = max(1, -(-count // most))
    yield from range(count - 1, -1, -step)


def failure(act: Callable[[], None]) -> str:
    """Return what an act is refused with, in the package's own words; nothing where it is done."""
    try:
        act()
    except ModelOptLiteError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def run_failing(setting: Setting, out: Path, fault: Fault) -> None:
    with failing_writes(fault):
        setting.run(out)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_every_write_may_fail(setting: Setting, number: int) -> None:
    """A disk that is full from some write on, or breaks."""
    counting = Fault(setting.folder, None)
    with failing_writes(counting):
        setting.run(setting.place())
    kinds = {call.split()[0] for call in counting.calls}
    assert {"open", "os.open", "pwrite", "fsync", "mkdir", "rename", "copyfile"} <= kinds
    assert len(counting.calls) > 20
    most = 30 if setting.recipe == DATA_FREE else 15
    for at in turns(len(counting.calls), most if number == errno.ENOSPC else most // 3):
        out = setting.place()
        fault = Fault(out.parent, at, number)
        told = failure(partial(run_failing, setting, out, fault))
        assert os.strerror(number) in told or hashes(out) == setting.wanted, fault.calls[at]
        setting.check(out)


@pytest.mark.parametrize("lasting", [True, False])
def test_every_read_may_fail(setting: Setting, lasting: bool) -> None:
    counting = Fault(setting.source, None)
    with failing_reads(counting):
        setting.run(setting.place())
    assert len(counting.calls) > 3
    for at in turns(len(counting.calls), 6):
        out = setting.place()
        with pytest.raises(CheckpointError, match=re.escape(os.strerror(errno.EIO))):
            with failing_reads(Fault(setting.source, at, errno.EIO, lasting=lasting)):
                setting.run(out)
        assert not out.exists()
        setting.check(out)


def test_short_reads_and_writes_are_continued(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel may do less than it was asked to, at any call."""
    real_read, real_write = os.preadv, os.pwrite
    short = 0

    def preadv(fd: int, buffers: Any, offset: int, *rest: Any) -> int:
        nonlocal short
        views = [memoryview(buffer).cast("B") for buffer in buffers]
        if sum(map(len, views)) > 100:
            short += 1
            return real_read(fd, [views[0][:100]], offset)
        return real_read(fd, buffers, offset, *rest)

    monkeypatch.setattr(os, "preadv", preadv)
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: real_write(fd, data[:100], at))
    out = setting.place()
    setting.run(out)
    assert short
    monkeypatch.undo()
    setting.check(out)


def test_a_place_that_is_read_only(setting: Setting) -> None:
    """Also for root, whom permissions do not stop: what the system says of such a file system."""
    out = setting.place()
    with failing_writes(Fault(out.parent, 0, errno.EROFS)):
        with pytest.raises(OutputError, match="Read-only file system"):
            setting.run(out)
    assert list(out.parent.iterdir()) == []
    setting.check(out)


def test_a_source_that_changes_meanwhile(setting: Setting) -> None:
    """Its weights are replaced between two units: what was read of the old is of no use."""
    weights = setting.source / "model.safetensors"
    kept, times = weights.read_bytes(), (weights.stat().st_atime_ns, weights.stat().st_mtime_ns)
    changed = bytearray(kept)
    changed[-2000:] = bytes(reversed(changed[-2000:]))
    done = 0

    def change(phase: str, *of: int) -> None:
        nonlocal done
        done += 1
        if done == 1:
            weights.write_bytes(changed)
            os.utime(weights, ns=(1, 1))

    out = setting.place()
    told = failure(lambda: setting.run(out, progress=change, resume=False))
    if told:
        assert "model.safetensors" in told
        assert not out.exists()
    else:
        assert setting.recipe == DATA_FREE, "units were still to be read"
        assert hashes(out) == setting.wanted, "all of it had been read before"
    weights.write_bytes(kept)
    os.utime(weights, ns=times)
    setting.check(out)


def test_clocks_that_jump(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    """The wall clock goes back a year at each look, and the other stands still."""
    now = time.time()

    def back() -> float:
        nonlocal now
        now -= 365 * 86400
        return now

    monkeypatch.setattr(time, "time", back)
    monkeypatch.setattr(time, "monotonic", lambda: 5.0)
    monkeypatch.setattr(time, "perf_counter", lambda: 5.0)
    out = setting.place()
    setting.run(out)
    monkeypatch.undo()
    setting.check(out)


def test_names_that_are_no_utf8(setting: Setting) -> None:
    """A folder above, the export's own, and a file that is copied."""
    odd = Path(os.fsdecode(b"caf\xe9 \xff"))
    moved = setting.folder / odd / "source"
    shutil.copytree(setting.source, moved)
    (moved / odd).write_bytes(b"kept")
    out = setting.folder / odd / Path(os.fsdecode(b"out\xfe"))
    setting.source, before = moved, setting.source
    setting.run(out)
    files = hashes(out)
    assert (out / odd).read_bytes() == b"kept"
    assert (out / "report.html").read_bytes()
    for command in (
        ["plan", str(moved), "-o", str(out), "--recipe", DATA_FREE, "--json"],
        ["verify", str(out), "--source", str(moved)],
    ):
        done = subprocess.run(
            [sys.executable, "-m", "modelopt_lite", *command], capture_output=True, check=False
        )
        assert done.returncode in {0, 1}, done.stderr
        assert b"Traceback" not in done.stderr
    names = {"README.md", str(odd)}  # the card names the folder of the source
    wanted = {name: h for name, h in setting.wanted.items() if name not in names}
    assert {name: h for name, h in files.items() if name not in names} == wanted
    setting.source = before


def test_a_loop_of_links_in_the_source(setting: Setting) -> None:
    (setting.source / "loop").symlink_to(setting.source, target_is_directory=True)
    (setting.source / "itself").symlink_to("itself")
    with pytest.raises(CheckpointError, match=r"itself|back to a folder above"):
        setting.run(setting.folder / "out")
    assert not (setting.folder / "out").exists()


def test_a_loop_of_links_at_the_export(setting: Setting) -> None:
    out = setting.place()
    out.symlink_to(out.name)
    with pytest.raises(OutputError, match=r"out"):
        setting.run(out)
    out.unlink()
    setting.check(out)
