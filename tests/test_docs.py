"""The pages of docs/: made ones are up to date, every example runs, and links lead somewhere.

docs/offload.md and docs/add_a_model.md have tests of their own beside what they are about.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import yaml
from made_pages import PAGES
from typer.testing import CliRunner

import modelopt_lite
from modelopt_lite import cli
from modelopt_lite.calibrate.chat import RecordReader
from modelopt_lite.recipes import parse_recipe

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
TINY = Path(modelopt_lite.__file__).parent / "data" / "tiny_qwen3_moe"
EXAMPLE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
ELSEWHERE = {
    "add_a_model.md": "tests/doctor/test_add_a_model.py",
    "offload.md": "tests/offload/test_docs.py",
}
# Lines of a shell that are not run here, and why.
NOT_RUN = {
    "pip install": "needs a registry; nox -s wheel installs the package",
    "hf auth login": "asks for a token",
    "nox": "a session of nox runs it",
    "PIP_EXTRA_INDEX_URL=": "needs a registry",
    "torchrun": "nox -s dist runs it",
    "modelopt-lite eval out --tasks": "its task is on a hub; nox -s eval runs a local one",
    "modelopt-lite specs check": "takes minutes; tests/doctor runs it for single types",
}
# Options that make the bundled model go through a line quickly; every line is else run as it is.
QUICK = {
    "quantize": "--calib-size 4 --calib-seq-len 64 --overwrite --no-progress",
    "plan": "--calib-size 4 --calib-seq-len 64",
    "eval": "--max-tokens 128 --no-progress",
    "verify": "",
}
RUNNABLE = sorted({*DOCS.glob("*.md"), ROOT / "README.md"} - {DOCS / name for name in ELSEWHERE})


def examples(page: Path) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = EXAMPLE.findall(page.read_text(encoding="utf-8"))
    return found


@pytest.mark.parametrize("name", sorted(PAGES))
def test_made_pages_are_up_to_date(name: str) -> None:
    made = PAGES[name]()
    assert (DOCS / name).read_text(encoding="utf-8") == made, (
        "run: python tests/helpers/made_pages.py"
    )


@pytest.mark.parametrize("name", sorted(ELSEWHERE))
def test_tests_elsewhere_are_there(name: str) -> None:
    assert examples(DOCS / name)
    assert f"docs/{name}" in (ROOT / ELSEWHERE[name]).read_text(encoding="utf-8")


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder as readers have it: the checkpoint under the names that pages give it."""
    monkeypatch.chdir(tmp_path)
    for name in ("path/to/checkpoint", "CKPT", "tiny_qwen3_moe"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(TINY, tmp_path / name)
    monkeypatch.setattr(huggingface_hub.HfApi, "create_repo", None)  # a dry run calls nothing
    return tmp_path


@pytest.mark.parametrize("page", RUNNABLE, ids=lambda page: page.name)
def test_examples_run(page: Path, workplace: Path) -> None:
    """In order, as a reader would run them; a yaml block whose first line is a name is a file."""
    names: dict[str, Any] = {"__name__": "__main__"}
    text = page.read_text(encoding="utf-8")
    if " out " in text and not re.search(
        r"export.dir[ =]\"?out", text
    ):  # the page goes on with one
        run_line("modelopt-lite quantize CKPT --recipe nvfp4 --export-dir out")
    for language, text in examples(page):
        if language == "python":
            shutil.rmtree("out", ignore_errors=True)
            names |= in_memory() if "forward_loop" in text else {}
            exec(compile(text, str(page), "exec"), names)  # the page's own text
        elif language == "yaml" and text.startswith("# "):
            Path(text.splitlines()[0].removeprefix("# ")).write_text(text)
        elif language == "yaml":
            assert parse_recipe({"name": "mine", **yaml.safe_load(text)}, where=str(page))
        elif language == "sh":
            for line in text.splitlines():
                run_line(line)
        elif language == "json":
            check_records(text)
        else:
            assert language == "", f"{page}: a block of {language} has no test"


def check_records(lines: str) -> None:
    """Of records of calibration data: each is understood, its pictures beside it."""
    Path("photos").mkdir()
    Path("photos/cat.png").touch()
    reader = RecordReader(Path("records.jsonl"), TINY, None, trust_remote_code=False)
    for line in lines.splitlines():
        record = json.loads(line)
        assert (reader._messages(record) is None) == (record.keys() == {"text"}), line


def in_memory() -> dict[str, Any]:
    """What a reader has who has a model in memory."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.bfloat16)
    return {"model": model, "batches": [{"input_ids": torch.arange(3, 67)[None]}]}


def run_line(line: str) -> None:
    if any(line.startswith(start) for start in NOT_RUN):
        return None
    line = re.sub(r"\s+#.*$", "", line).replace("OWNER/NAME", "owner/name")
    program, *words = shlex.split(line)
    assert program == "modelopt-lite", f"{line!r} has no test"
    if words[0] == "specs" and words[1] == "new":
        return check_options(words)
    if "--world-size" in words or "--search-dir" in words or "mixed.yaml" in words:
        words += ["--calib-size", "1", "--calib-seq-len", "16"]
    words += shlex.split(QUICK.get(words[0], ""))
    result = CliRunner().invoke(cli.app, words, catch_exceptions=False)
    assert result.exit_code == 0, (line, result.output)
    return None


def check_options(words: list[str]) -> None:
    """Of a command that another test runs: it is one, with these options."""
    told = CliRunner().invoke(cli.app, [words[0], words[1], "--help"]).stdout
    assert all(word in told for word in words if word.startswith("--"))


# --- the site


def test_every_page_is_in_the_navigation() -> None:
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    listed = set(re.findall(r"(\w+\.md)$", text, re.MULTILINE))
    assert listed == {page.name for page in DOCS.glob("*.md")}


@pytest.mark.parametrize("page", sorted(DOCS.glob("*.md")), ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (page.parent / target).is_file(), target
