"""Runs that meet at one folder, and what is left of one that is killed while it puts its export
into place."""

from __future__ import annotations

import fcntl
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from modelopt_lite.errors import OutputError
from modelopt_lite.output import discard_unfinished, staged


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "out"


def export(target: Path, text: str, *, overwrite: bool = False) -> None:
    with staged(target, overwrite=overwrite) as work:
        (work / "config.json").write_text(text)


def content(target: Path) -> str:
    assert [path.name for path in target.parent.iterdir()] == [target.name]
    return (target / "config.json").read_text()


def test_nothing_is_removed_that_another_run_has(target: Path) -> None:
    with staged(target, overwrite=False) as work:
        (work / "config.json").write_text("whole")
        discard_unfinished(target)
        with pytest.raises(OutputError, match="another run"), staged(target, overwrite=False):
            raise AssertionError("it was given to two")
    assert content(target) == "whole"


def test_what_was_left_is_removed(target: Path) -> None:
    work = target.with_name(f".{target.name}.partial")
    (work / "export").mkdir(parents=True)
    discard_unfinished(target)
    assert not work.exists()
    discard_unfinished(target)
    assert not work.exists()


@pytest.mark.parametrize("at", ["open", "flock"])
def test_a_folder_that_its_run_removes_meanwhile(
    target: Path, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    """Another run ends, and a third begins, between two steps of taking the folder."""
    module = {"open": os, "flock": fcntl}[at]
    step = getattr(module, at)
    seen: list[Path] = []

    def late(*arguments: Any, **options: Any) -> Any:
        work = target.with_name(f".{target.name}.partial")
        if not seen:
            seen.append(work)
            shutil.rmtree(work)
            if at == "flock":  # the third run has its own folder there
                work.mkdir()
        return step(*arguments, **options)

    with monkeypatch.context() as patched:
        patched.setattr(module, at, late)
        run = staged(target, overwrite=False)
        work = run.__enter__()
    assert seen
    with pytest.raises(OutputError, match="another run"):
        export(target, "other")
    (work / "config.json").write_text("whole")
    run.__exit__(None, None, None)
    assert content(target) == "whole"


def test_an_export_that_appeared_meanwhile_is_not_replaced(target: Path) -> None:
    export(target, "first")
    with pytest.raises(OutputError, match="is not empty"):
        export(target, "second")
    assert content(target) == "first"


@pytest.mark.parametrize("again", ["succeeds", "fails"])
def test_killed_between_taking_the_old_and_putting_the_new(
    target: Path, monkeypatch: pytest.MonkeyPatch, again: str
) -> None:
    export(target, "old")
    killed = os.fork()
    if not killed:
        rename = Path.rename

        def once(path: Path, to: Path) -> Path:
            rename(path, to)
            os._exit(9)

        monkeypatch.setattr(Path, "rename", once)
        export(target, "new", overwrite=True)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(killed, 0)[1]) == 9
    assert not target.exists()
    if again == "succeeds":
        export(target, "new", overwrite=True)
        assert content(target) == "new"
    else:
        with pytest.raises(RuntimeError), staged(target, overwrite=True):
            raise RuntimeError
        assert content(target) == "old"


def test_the_old_export_stays_where_the_new_one_cannot_be_put(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    export(target, "old")
    rename = Path.rename

    def fails(path: Path, to: Path) -> Path:
        if path.name == "export":
            raise OSError("no")
        return rename(path, to)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", fails)
        with pytest.raises(OutputError, match="cannot put the export in place"):
            export(target, "new", overwrite=True)
    assert content(target) == "old"


def test_a_place_where_no_folder_can_be_made() -> None:
    with pytest.raises(OutputError, match="cannot make a folder"):
        export(Path("/proc/modelopt-lite/out"), "x")
