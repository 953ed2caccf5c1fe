"""The examples of docs/offload.md run, in order, as one reader would run them."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch

from modelopt_lite.offload import OffloadConfig, load_config

DOCS = Path(__file__).parent.parent.parent / "docs"
PAGE = DOCS / "offload.md"
EXAMPLE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def examples() -> list[tuple[str, str]]:
    return EXAMPLE.findall(PAGE.read_text(encoding="utf-8"))


@torch.no_grad()
def test_the_examples_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("FT_")]:
        monkeypatch.delenv(name)
    names: dict[str, Any] = {"__name__": "__main__"}  # the page brings all that it uses
    expected = None
    languages = [language for language, _ in examples()]
    assert languages.count("python") >= 12
    assert set(languages) == {"python", "yaml", "bash"}
    for language, text in examples():
        if language == "yaml":
            Path(text.splitlines()[0].removeprefix("# ")).write_text(text)
        elif language == "bash":
            for line in text.splitlines():
                check_command(line, monkeypatch)
        else:
            exec(compile(text, str(PAGE), "exec"), names)  # the page's own text
            output = names["model"](names["inputs"])
            expected = output if expected is None else expected
            assert torch.equal(output, expected), text
    assert (tmp_path / "trace.json").stat().st_size


def check_command(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A line is variables and a command; they make a configuration that is not the default."""
    *assignments, program, script = shlex.split(line)
    assert (program, script) == ("python", "serve.py")
    with monkeypatch.context() as patch:
        for assignment in assignments:
            name, _, value = assignment.partition("=")
            patch.setenv(name, value)
        config = load_config()
    assert config.enabled
    assert config != OffloadConfig()


def test_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", PAGE.read_text(encoding="utf-8")):
        assert target.startswith("https://") or (DOCS / target).exists(), target
