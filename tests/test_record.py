"""`record`: what was measured of an export is kept in its report, page and card."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from modelopt_lite import cli, quantize_and_export
from modelopt_lite.errors import OutputError
from modelopt_lite.record import read_report, record
from modelopt_lite.report import CARD_FILE, PAGE_FILE, REPORT_FILE

MakeCheckpoint = Callable[..., Path]
RECIPE = "fp8_per_channel_per_token"


@pytest.fixture
def export(checkpoint: MakeCheckpoint, tmp_path: Path) -> Path:
    source, out = checkpoint("llama"), tmp_path / "out"
    quantize_and_export(source, export_dir=out, recipe=RECIPE, progress=False)
    return out


def test_of_several_dialects_one_is_recorded(checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    out = tmp_path / "both"
    quantize_and_export(
        checkpoint("llama"), export_dir=out, recipe=RECIPE, dialect="both", progress=False
    )
    with pytest.raises(OutputError, match="give the folder of the one"):
        record(out, {"on": "x", "perplexity": 1.0})
    record(out / "modelopt", {"on": "x", "perplexity": 7.25})
    assert "7.2500" in (out / "modelopt" / CARD_FILE).read_text()
    assert "7.2500" not in (out / "compressed-tensors" / CARD_FILE).read_text()
    assert "x (modelopt)" in (out / PAGE_FILE).read_text()


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


ODD: tuple[Any, ...] = (5, "x", {"a": []}, [{"on": "x", "perplexity": "low"}])


def refusal(export: Path) -> str:
    """Return what a measurement is refused with; nothing where it is recorded."""
    try:
        record(export, {"on": "text", "perplexity": 1.0})
    except OutputError as error:
        return str(error)
    return ""


def test_reports_that_someone_changed(export: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each value in turn is another one; what cannot be told is refused, and nothing is written."""
    monkeypatch.setattr("modelopt_lite.pages.charts.available", lambda: False)  # 200 pages
    path = export / REPORT_FILE
    whole = json.loads(path.read_text())
    names = [*whole, "unknown", *(f"details.{key}" for key in whole["details"])]
    refused = set()
    for name in names:
        for value in ODD:
            report = json.loads(json.dumps(whole))
            group, _, key = name.rpartition(".")
            (report[group] if group else report)[key] = value
            path.write_text(json.dumps(report))
            before = {file.name: file.read_bytes() for file in export.iterdir()}
            if said := refusal(export):
                assert "is no report of this program" in said
                assert {file.name: file.read_bytes() for file in export.iterdir()} == before
                refused.add(name)
    assert {"unknown", "dialects", "accuracy", "timeline", "seconds", "ranks"} < refused
