"""`push`: the hub's own client against a hub on this machine."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from local_hub import TOKEN, Hub, local_hub
from typer.testing import CliRunner

from modelopt_lite import cli, quantize_and_export
from modelopt_lite.errors import AuditError, OutputError
from modelopt_lite.hub import push
from modelopt_lite.report import CARD_FILE, PAGE_FILE, REPORT_FILE

MakeCheckpoint = Callable[..., Path]
RECIPE = "fp8_per_channel_per_token"
NAME = "owner/name"
BATCH = f"POST /{NAME}.git/info/lfs/objects/batch"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with local_hub() as hub:
        for name, value in {"ENDPOINT": hub.url, "HF_HUB_DISABLE_XET": True}.items():
            monkeypatch.setattr(huggingface_hub.constants, name, value)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        # The client waits between tries; a test does not.
        hasty = SimpleNamespace(**{**vars(time), "sleep": lambda seconds: None})
        monkeypatch.setattr("huggingface_hub.utils._http.time", hasty)
        yield hub


@pytest.fixture
def export(checkpoint: MakeCheckpoint, tmp_path: Path) -> Path:
    source, out = checkpoint("llama"), tmp_path / "out"
    (source / "added [1].json").write_text("{}")
    quantize_and_export(
        source, export_dir=out, recipe=RECIPE, progress=False, max_shard_size="10kB"
    )
    return out


def files_of(export: Path) -> dict[str, bytes]:
    """What of an export belongs on the hub."""
    names = {path.name for path in export.iterdir()} - {REPORT_FILE, PAGE_FILE}
    return {name: (export / name).read_bytes() for name in names}


def on_hub(hub: Hub, branch: str = "main") -> dict[str, bytes]:
    found = dict(hub.repos[NAME][branch])
    assert found.pop(".gitattributes") == b""
    return found


def test_the_folder_is_on_the_hub_byte_for_byte_in_one_commit(export: Path, hub: Hub) -> None:
    wanted = files_of(export)
    assert sum(name.endswith(".safetensors") for name in wanted) > 2
    assert {CARD_FILE, "config.json", "hf_quant_config.json"} < wanted.keys()
    done = push(export, NAME, private=True)
    assert on_hub(hub) == wanted
    assert done.files == {name: len(data) for name, data in wanted.items()}
    assert done.url == f"{hub.url}/{NAME}/commit/1"
    assert hub.messages == [f"Upload an export of modelopt-lite, recipe {RECIPE}"]
    assert hub.private[NAME] in {True, "private"}
    assert files_of(export) == wanted  # and nothing of the client's lies in the folder
    again = push(export, NAME, message="again")
    assert on_hub(hub) == wanted
    assert not again.removed
    assert hub.asked_for("PUT /lfs/") == len(hub.blobs)  # each once, none of them again


def test_what_is_no_part_of_the_export_stays_here(export: Path, hub: Hub) -> None:
    (export / ".cache").mkdir()
    (export / ".cache" / "x").touch()
    (export / "journal").mkdir()
    (export / "journal" / "journal.jsonl").touch()
    (export / "added 1.json").touch()  # what a pattern of the name with brackets would match
    (export / "away").symlink_to("/etc/hostname")
    push(export, NAME)
    assert {"added [1].json", "added 1.json"} < on_hub(hub).keys()
    assert not {name for name in on_hub(hub) if name.split("/")[0] in {"journal", "away"}}
    assert not {name for name in on_hub(hub) if name.startswith(".")}


def test_reports_go_along_where_asked(export: Path, hub: Hub) -> None:
    push(export, NAME, reports=True)
    assert {REPORT_FILE, PAGE_FILE} < on_hub(hub).keys()


def test_a_branch_and_a_pull_request(export: Path, hub: Hub) -> None:
    wanted = files_of(export)
    push(export, NAME, revision="dev/fp8")
    assert on_hub(hub, "dev/fp8") == wanted
    assert on_hub(hub) == {}
    done = push(export, NAME, create_pr=True)
    assert done.url == f"{hub.url}/{NAME}/discussions/2"
    assert on_hub(hub, "refs/pr/2") == wanted
    assert on_hub(hub) == {}


def test_weights_of_an_earlier_export_go_with_the_commit(
    export: Path, hub: Hub, checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    """An engine that finds the old index would load the old weights."""
    push(export, NAME)
    hub.repos[NAME]["main"]["notes/model.safetensors"] = b"the owner's"
    before = on_hub(hub).keys()
    other = tmp_path / "other"
    quantize_and_export(
        checkpoint("llama", num_hidden_layers=1),
        export_dir=other,
        recipe=RECIPE,
        dialect="compressed-tensors",
        progress=False,
    )
    done = push(other, NAME)
    assert on_hub(hub) == {
        **files_of(other),
        "added [1].json": b"{}",
        "notes/model.safetensors": b"the owner's",
    }
    assert {*done.removed} == before - on_hub(hub).keys()
    assert {"hf_quant_config.json", "model.safetensors.index.json"} < {*done.removed}


def test_a_dry_run_asks_nothing(export: Path, hub: Hub) -> None:
    done = push(export, NAME, dry_run=True)
    assert done.files == {name: len(data) for name, data in files_of(export).items()}
    result = CliRunner().invoke(cli.app, ["push", str(export), NAME, "--dry-run"])
    assert result.exit_code == 0, result.output
    assert "would upload" in result.stdout
    assert hub.asked == []


# --- what goes wrong there


@pytest.mark.parametrize("token", ["hf_wrong", None])
def test_a_token_that_is_refused(
    export: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, token: str | None
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_TOKEN_PATH", str(tmp_path / "none"))
    monkeypatch.delenv("HF_TOKEN")
    if token:
        monkeypatch.setenv("HF_TOKEN", token)
    with pytest.raises(OutputError, match=r"401.*log in with `hf auth login`"):
        push(export, NAME)
    assert not hub.repos


@pytest.mark.parametrize(
    "where", ["POST /api/repos/create", "preupload", BATCH, "PUT /lfs/", "/verify", "/commit/"]
)
@pytest.mark.parametrize("how", ["refused", "broken"])
def test_an_upload_that_fails_on_the_way(export: Path, hub: Hub, where: str, how: str) -> None:
    """What was committed before stays as it was; the same again sends what is missing alone."""
    hub.repos[NAME] = {"main": {".gitattributes": b"", "model.safetensors": b"earlier"}}

    let_through = threading.Semaphore(2)

    def fails(asked: str) -> tuple[int, Any] | None:
        """Two files are taken and no third; all of them come at once, each on a thread."""
        if where not in asked:
            return None
        if where == "PUT /lfs/":
            if let_through.acquire(blocking=False):
                return None
            while len(hub.blobs) < 2:
                time.sleep(0.01)
        if how == "broken":
            raise ConnectionError
        return 403, {"error": "You have no rights here"}

    hub.before = fails
    if (how, where) == ("refused", "POST /api/repos/create"):
        push(export, NAME)  # may write there, and may make none
        return
    with pytest.raises(OutputError, match=rf"'{NAME}' cannot be written.*run the same again"):
        push(export, NAME)
    assert on_hub(hub) == {"model.safetensors": b"earlier"}
    kept = len(hub.blobs)
    assert where != "PUT /lfs/" or kept == 2
    hub.before = lambda asked: None
    hub.asked.clear()
    push(export, NAME)
    assert on_hub(hub) == files_of(export)
    assert hub.asked_for("PUT /lfs/") == len(hub.blobs) - kept


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGKILL])
def test_a_signal_during_the_upload(export: Path, hub: Hub, sent: signal.Signals) -> None:
    before = {path.name: path.read_bytes() for path in export.iterdir()}
    command = [sys.executable, "-m", "modelopt_lite", "push", str(export), NAME]
    env = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HUB_DISABLE_XET": "1"}
    child = subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True)

    first = threading.Lock()

    def stops(asked: str) -> None:
        """One file is taken; the signal comes while all others are on their way."""
        if "PUT /lfs/" not in asked or first.acquire(blocking=False):
            return
        while not hub.blobs:
            time.sleep(0.01)
        child.send_signal(sent)

    hub.before = stops
    _, told = child.communicate()
    assert child.returncode == (130 if sent is signal.SIGTERM else -sent), told
    assert ("run the same again" in told) == (sent is signal.SIGTERM)
    assert on_hub(hub) == {}
    assert hub.blobs
    assert {path.name: path.read_bytes() for path in export.iterdir()} == before
    hub.before = lambda asked: None
    push(export, NAME)
    assert on_hub(hub) == files_of(export)


# --- what is refused before the hub is asked


def test_unfinished_exports_are_refused(
    export: Path, hub: Hub, checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    def stop(phase: str, done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantize_and_export(
            checkpoint("qwen3_moe"), export_dir=tmp_path / "b", recipe=RECIPE, progress=stop
        )
    left = tmp_path / ".b.partial"
    assert (left / "journal").is_dir()
    for folder in (left, left / "export"):
        with pytest.raises(OutputError, match="unfinished run"):
            push(folder, NAME)
    (export / REPORT_FILE).unlink()
    with pytest.raises(OutputError, match="no finished export"):
        push(export, NAME)
    with pytest.raises(OutputError, match="does not exist"):
        push(tmp_path / "none", NAME)
    assert hub.asked == []


def test_damaged_exports_are_refused(export: Path, hub: Hub) -> None:
    config = export / "hf_quant_config.json"
    config.write_text(config.read_text().replace("lm_head", "lm_hat"))
    with pytest.raises(AuditError, match=r"broken, first: .*--no-verify"):
        push(export, NAME)
    assert hub.asked == []
    push(export, NAME, verify=False)
    assert on_hub(hub) == files_of(export)


@pytest.mark.parametrize("name", ["", "a/b/c", "-x/y", "own er/name", "owner/name.git"])
def test_names_that_are_none(export: Path, hub: Hub, name: str) -> None:
    with pytest.raises(OutputError, match="no name of a repository"):
        push(export, name)
    assert hub.asked == []


def test_names_of_files_that_the_hub_cannot_have(export: Path, hub: Hub) -> None:
    (export / os.fsdecode(b"caf\xe9")).touch()
    with pytest.raises(OutputError, match="not UTF-8; rename it"):
        push(export, NAME)
    assert hub.asked == []


def test_several_dialects_are_pushed_one_by_one(
    checkpoint: MakeCheckpoint, hub: Hub, tmp_path: Path
) -> None:
    out = tmp_path / "both"
    quantize_and_export(
        checkpoint("llama"), export_dir=out, recipe=RECIPE, dialect="both", progress=False
    )
    with pytest.raises(OutputError, match="give the folder of one"):
        push(out, NAME)
    push(out / "compressed-tensors", NAME)
    assert on_hub(hub) == files_of(out / "compressed-tensors")
    shutil.copytree(out / "modelopt", out / "mine")
    with pytest.raises(OutputError, match="no finished export"):
        push(out / "mine", NAME)
