"""Places where an export cannot or must not go."""

from __future__ import annotations

import os
import shutil
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from torch import Tensor

from modelopt_lite import quantize_and_export
from modelopt_lite.errors import (
    NonFiniteError,
    OutputError,
)
from modelopt_lite.verify.audit import audit

MakeCheckpoint = Callable[..., Path]
Refuse = Callable[..., str]
WEIGHTS = "model.safetensors"
Q1 = "model.layers.1.self_attn.q_proj.weight"
Usage = namedtuple("Usage", "total used free")


def test_folder_that_is_not_empty(checkpoint: MakeCheckpoint, refuse: Refuse) -> None:
    source = checkpoint("llama")
    out = source.parent / "out"
    out.mkdir()
    (out / "precious").write_text("mine")
    refuse(OutputError, source, "is not empty", str(out), "overwrite=True")


def test_overwrite_replaces_and_a_failed_run_keeps(
    damage: Any, checkpoint: MakeCheckpoint, refuse: Refuse, token_batches: list[Tensor]
) -> None:
    source = checkpoint("llama")
    out = source.parent / "out"
    (out / "deep").mkdir(parents=True)
    (out / "deep" / "old").write_text("old")
    damage.poison(source, Q1, {0: float("nan")})
    refuse(NonFiniteError, source, Q1, overwrite=True, while_running=True)
    damage.poison(source, Q1, {0: 0.0})
    quantize_and_export(
        source, export_dir=out, calib_data=token_batches, overwrite=True, progress=False
    )
    assert not (out / "deep").exists()
    assert audit(out, source=source, deep=True) == []
    assert sorted(source.parent.iterdir()) == sorted([out, source])


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("where", ["source", "inside", "around", "link"])
def test_source_and_export_lie_inside_one_another(
    checkpoint: MakeCheckpoint, refuse: Refuse, tmp_path: Path, where: str, overwrite: bool
) -> None:
    source = checkpoint("llama")
    (tmp_path / "link").symlink_to(source)
    out = {
        "source": source,
        "inside": source / "a" / "b",
        "around": tmp_path,
        "link": tmp_path / "link" / "a",
    }[where]
    refuse(OutputError, source, "inside", "elsewhere", export_dir=out, overwrite=overwrite)


def test_export_dir_is_a_file(checkpoint: MakeCheckpoint, refuse: Refuse) -> None:
    source = checkpoint("llama")
    file = source.parent / "file"
    file.write_text("x")
    refuse(OutputError, source, "is a file", export_dir=file)
    refuse(OutputError, source, str(file), export_dir=file / "below")


def test_parent_that_cannot_be_written(
    checkpoint: MakeCheckpoint, refuse: Refuse, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, parent = checkpoint("llama"), tmp_path / "locked"
    parent.mkdir()
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != parent)
    refuse(OutputError, source, "not writable", str(parent), export_dir=parent / "out")


def test_disk_without_room(
    checkpoint: MakeCheckpoint, refuse: Refuse, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = checkpoint("llama")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10**6, 10**6 - 1234, 1234))
    message = refuse(OutputError, source, "needs ", "1,234", "are free", "free ")
    needs = int(message.split("needs ")[1].split(" ")[0].replace(",", ""))
    assert f"{needs - 1234:,} bytes or choose" in message
    weights = sum(t.numel() for t in load_file(source / WEIGHTS).values())
    assert weights / 2 < needs < 2.5 * weights + 50_000


def test_unwritten_parents_are_removed_again(
    damage: Any, checkpoint: MakeCheckpoint, refuse: Refuse
) -> None:
    source = checkpoint("llama")
    damage.poison(source, Q1, {0: float("nan")})
    out = source.parent / "new" / "newer" / "out"
    refuse(NonFiniteError, source, Q1, export_dir=out, while_running=True)
