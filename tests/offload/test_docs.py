"""The examples of docs/offload.md run, in order, as one reader would run them."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from modelopt_lite.offload import OffloadConfig, load_config

DOCS = Path(__file__).parent.parent.parent / "docs"
PAGE = DOCS / "offload.md"
EXAMPLE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(200)
        self.linear = nn.Linear(200, 200)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = x + self.linear(self.norm(x))
        return made


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 200)
        self.layers = nn.ModuleList(Layer() for _ in range(6))
        self.lm_head = nn.Linear(200, 10)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        made: Tensor = self.lm_head(x)
        return made


def examples() -> list[tuple[str, str]]:
    return EXAMPLE.findall(PAGE.read_text(encoding="utf-8"))


@torch.no_grad()
def test_the_examples_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("FT_")]:
        monkeypatch.delenv(name)
    model = Model().requires_grad_(False).eval()
    (tmp_path / "checkpoint").mkdir()
    save_file(model.state_dict(), tmp_path / "checkpoint/model.safetensors")
    (tmp_path / "checkpoint/config.json").write_text("{}")
    inputs = torch.arange(8).reshape(2, 4)
    expected = model(inputs)
    names = {"model": model, "inputs": inputs, "Model": Model, "torch": torch}
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
            assert torch.equal(model(inputs), expected), text
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
