"""`push` and `record`: what is uploaded, what never is, and what is refused."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from typer.testing import CliRunner

from modelopt_lite import cli, quantize_and_export
from modelopt_lite.errors import AuditError, OutputError
from modelopt_lite.hub import push
from modelopt_lite.record import read_report, record
from modelopt_lite.report import CARD_FILE, PAGE_FILE, REPORT_FILE

MakeCheckpoint = Callable[..., Path]
RECIPE = "fp8_per_channel_per_token"


class FakeApi:
    """Takes what is uploaded, as the hub's client chooses it."""

    calls: list[tuple[str, dict[str, Any]]]
    error: Exception | None = None

    def create_repo(self, repo_id: str, **options: Any) -> None:
        self.calls.append(("create_repo", {"repo_id": repo_id, **options}))
        if self.error is not None:
            raise self.error

    def upload_folder(self, **options: Any) -> Any:
        folder = Path(options["folder_path"])
        names = [p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()]
        wanted = options["allow_patterns"]
        options["uploaded"] = {n for n in names if any(fnmatch(n, p) for p in wanted)}
        self.calls.append(("upload_folder", options))
        return SimpleNamespace(commit_url="https://huggingface.co/o/n/commit/1", pr_url=None)


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> type[FakeApi]:
    monkeypatch.setattr(FakeApi, "calls", [], raising=False)
    monkeypatch.setattr(FakeApi, "error", None)
    monkeypatch.setattr(huggingface_hub, "HfApi", FakeApi)
    return FakeApi


@pytest.fixture
def export(checkpoint: MakeCheckpoint, tmp_path: Path) -> Path:
    source, out = checkpoint("llama"), tmp_path / "out"
    (source / "added [1].json").write_text("{}")
    quantize_and_export(source, export_dir=out, recipe=RECIPE, progress=False)
    return out


def test_uploads_the_export_in_one_commit(export: Path, api: type[FakeApi]) -> None:
    (export / ".cache").mkdir()
    (export / ".cache" / "x").touch()
    (export / "journal").mkdir()
    (export / "journal" / "journal.jsonl").touch()
    (export / "added 1.json").touch()  # what a pattern of the name with brackets would match
    (export / "away").symlink_to("/etc/hostname")
    done = push(export, "owner/name", revision="dev", private=True)
    [made, uploaded] = api.calls
    assert made == (
        "create_repo",
        {"repo_id": "owner/name", "private": True, "exist_ok": True},
    )
    assert uploaded[1]["revision"] == "dev"
    assert uploaded[1]["create_pr"] is False
    assert RECIPE in uploaded[1]["commit_message"]
    names = {"model.safetensors", "config.json", "hf_quant_config.json", "generation_config.json"}
    assert uploaded[1]["uploaded"] == names | {CARD_FILE, "added [1].json", "added 1.json"}
    assert set(done.files) == uploaded[1]["uploaded"]
    assert done.url == "https://huggingface.co/o/n/commit/1"


def test_names_with_brackets_stand_for_themselves(export: Path, api: type[FakeApi]) -> None:
    done = push(export, "owner/name")
    assert "added [1].json" in api.calls[1][1]["uploaded"]
    assert done.files["added [1].json"] == 2


def test_reports_go_along_where_asked(export: Path, api: type[FakeApi]) -> None:
    push(export, "owner/name", reports=True)
    assert {REPORT_FILE, PAGE_FILE} <= api.calls[1][1]["uploaded"]


def test_a_dry_run_uploads_nothing(export: Path, api: type[FakeApi]) -> None:
    done = push(export, "owner/name", dry_run=True)
    assert api.calls == []
    assert done.files["model.safetensors"] == (export / "model.safetensors").stat().st_size
    result = CliRunner().invoke(cli.app, ["push", str(export), "owner/name", "--dry-run"])
    assert result.exit_code == 0, result.output
    assert "would upload" in result.stdout
    assert api.calls == []


def test_unfinished_exports_are_refused(
    export: Path, api: type[FakeApi], checkpoint: MakeCheckpoint, tmp_path: Path
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
            push(folder, "owner/name")
    (export / REPORT_FILE).unlink()
    with pytest.raises(OutputError, match="no finished export"):
        push(export, "owner/name")
    with pytest.raises(OutputError, match="does not exist"):
        push(tmp_path / "none", "owner/name")
    assert api.calls == []


def test_damaged_exports_are_refused(export: Path, api: type[FakeApi]) -> None:
    config = export / "hf_quant_config.json"
    config.write_text(config.read_text().replace("lm_head", "lm_hat"))
    with pytest.raises(AuditError, match=r"broken, first: .*--no-verify"):
        push(export, "owner/name")
    assert api.calls == []
    push(export, "owner/name", verify=False)
    assert len(api.calls) == 2


@pytest.mark.parametrize("name", ["", "a/b/c", "-x/y", "own er/name", "owner/name.git"])
def test_names_that_are_none(export: Path, api: type[FakeApi], name: str) -> None:
    with pytest.raises(OutputError, match="no name of a repository"):
        push(export, name)
    assert api.calls == []


@pytest.mark.parametrize("error", [OSError("no route"), ValueError("no token")])
def test_what_the_hub_refuses(export: Path, api: type[FakeApi], error: Exception) -> None:
    api.error = error
    with pytest.raises(OutputError, match=rf"{error}; log in with `hf auth login`"):
        push(export, "owner/name")


def test_several_dialects_are_pushed_one_by_one(
    checkpoint: MakeCheckpoint, api: type[FakeApi], tmp_path: Path
) -> None:
    out = tmp_path / "both"
    quantize_and_export(
        checkpoint("llama"), export_dir=out, recipe=RECIPE, dialect="both", progress=False
    )
    with pytest.raises(OutputError, match="give the folder of one"):
        push(out, "owner/name")
    push(out / "compressed-tensors", "owner/name")
    assert "config.json" in api.calls[1][1]["uploaded"]
    with pytest.raises(OutputError, match="give the folder of the one"):
        record(out, {"on": "x", "perplexity": 1.0})
    record(out / "modelopt", {"on": "x", "perplexity": 7.25})
    assert "7.2500" in (out / "modelopt" / CARD_FILE).read_text()
    assert "7.2500" not in (out / "compressed-tensors" / CARD_FILE).read_text()
    assert "x (modelopt)" in (out / PAGE_FILE).read_text()
    shutil.copytree(out / "modelopt", out / "mine")
    with pytest.raises(OutputError, match="no finished export"):
        push(out / "mine", "owner/name")


# --- what was measured


def test_what_was_measured_is_in_report_page_and_card(export: Path) -> None:
    record(export, {"on": "wikitext", "perplexity": 5.5, "kl": None, "tokens": 100})
    record(export, {"on": "wikitext", "kl": 0.25})
    record(export, {"on": "arc: acc", "value": 0.5, "stderr": 0.125})
    _, report = read_report(export)
    assert report.accuracy == [
        {"part": "", "on": "wikitext", "perplexity": 5.5, "tokens": 100, "kl": 0.25},
        {"part": "", "on": "arc: acc", "value": 0.5, "stderr": 0.125},
    ]
    for name in (CARD_FILE, PAGE_FILE):
        text = (export / name).read_text(encoding="utf-8")
        assert all(word in text for word in ("wikitext", "5.5000", "0.25000", "arc: acc"))
    source = report.details["source"]
    again = quantize_and_export(source, export_dir=export, recipe=RECIPE, progress=False)
    assert again.reused
    assert again.accuracy == report.accuracy


def test_only_exports_of_ours_are_written_to(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="no finished export"):
        record(tmp_path, {"on": "x"})
    (tmp_path / REPORT_FILE).write_text(json.dumps({"recipe": 1}))
    with pytest.raises(OutputError, match="is no report of this program"):
        record(tmp_path, {"on": "x"})
    (tmp_path / REPORT_FILE).write_text("[]")
    with pytest.raises(OutputError, match="is no report of this program"):
        record(tmp_path, {"on": "x"})


def test_what_the_owner_wrote_into_the_card_stays(export: Path) -> None:
    card = export / CARD_FILE
    edited = (
        card.read_text().replace("## Accuracy", "Made with care.\n\n## Accuracy") + "\n## Thanks\n"
    )
    card.write_text(edited)
    record(export, {"on": "wikitext", "perplexity": 5.5})
    record(export, {"on": "wikitext", "perplexity": 6.5})
    text = card.read_text()
    assert "Not measured" not in text
    assert text.count("| wikitext | 6.5000 |") == 1
    before, after = text.split("## Accuracy")
    assert edited.startswith(before)
    assert edited.endswith(after[after.index("## Engines") :])
    card.write_text("Mine alone.\n")
    record(export, {"on": "wikitext", "perplexity": 7.5})
    assert card.read_text() == "Mine alone.\n"
    card.unlink()
    record(export, {"on": "wikitext", "perplexity": 7.5})
    assert not card.exists()


@pytest.mark.parametrize("file", [REPORT_FILE, PAGE_FILE, CARD_FILE])
def test_a_full_disk_while_it_is_recorded_damages_nothing(
    export: Path, monkeypatch: pytest.MonkeyPatch, file: str
) -> None:
    before = {path.name: path.read_bytes() for path in export.iterdir()}
    write = Path.write_text

    def full(path: Path, text: str, **options: Any) -> int:
        if file not in path.name:
            return write(path, text, **options)
        write(path, text[: len(text) // 2], **options)
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_text", full)
        with pytest.raises(OutputError, match="No space left"):
            record(export, {"on": "wikitext", "perplexity": 5.5})
    after = {path.name: path.read_bytes() for path in export.iterdir()}
    assert after.keys() == before.keys()
    assert after[file] == before[file]
    record(export, {"on": "wikitext", "perplexity": 5.5})
    assert "5.5000" in (export / file).read_text() or file == REPORT_FILE
    assert read_report(export)[1].accuracy[0]["perplexity"] == 5.5


def test_several_processes_record_at_once(export: Path) -> None:
    children = []
    for number in range(6):
        child = os.fork()
        if not child:
            try:
                record(export, {"on": f"text {number}", "perplexity": float(number)})
            except BaseException:
                os._exit(1)
            os._exit(0)
        children.append(child)
    ended = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    assert ended == [0] * 6
    found = {row["on"] for row in read_report(export)[1].accuracy}
    assert found == {f"text {number}" for number in range(6)}
    for file in (PAGE_FILE, CARD_FILE):
        assert all(name in (export / file).read_text() for name in found)


@pytest.mark.parametrize(
    "command",
    [
        ["eval", "{}", "--record"],
        ["eval", "{}", "--record", "--tasks", "arc_easy"],
        ["verify", "{}", "--source", "{}", "--deep", "--text", "cpython", "--record"],
    ],
)
def test_what_cannot_be_recorded_is_not_measured(
    checkpoint: MakeCheckpoint, monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    def measured(*arguments: Any, **options: Any) -> None:
        raise AssertionError("hours were spent")

    monkeypatch.setattr("modelopt_lite.evaluate.perplexity", measured)
    monkeypatch.setattr("modelopt_lite.harness.run_tasks", measured)
    monkeypatch.setattr("modelopt_lite.checking.check_exports", measured)
    source = checkpoint("llama")
    result = CliRunner().invoke(cli.app, [part.format(source) for part in command])
    assert result.exit_code == 1, result.output
    assert f"has no {REPORT_FILE}" in result.output
