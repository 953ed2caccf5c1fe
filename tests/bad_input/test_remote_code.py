"""Code that comes with a checkpoint is not run untrusted; the command line exits with 1."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor
from typer.testing import CliRunner

from modelopt_lite import quantize_and_export
from modelopt_lite.cli import app
from modelopt_lite.errors import (
    CalibrationError,
    RemoteCodeError,
)
from modelopt_lite.verify.audit import audit

MakeCheckpoint = Callable[..., Path]
Refuse = Callable[..., str]


CODE = """
from pathlib import Path
Path(__file__).parent.joinpath("ran").touch()
Path({marker!r}).touch()
from transformers import LlamaConfig, LlamaForCausalLM
class MineConfig(LlamaConfig):
    model_type = "mine"
class MineForCausalLM(LlamaForCausalLM):
    config_class = MineConfig
"""


@pytest.fixture
def remote(
    damage: Any, checkpoint: MakeCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Path:
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    source = checkpoint("llama")
    (source / "mine.py").write_text(CODE.format(marker=str(tmp_path / "marker")))
    damage.config(
        source,
        model_type="mine",
        architectures=["MineForCausalLM"],
        auto_map={"AutoConfig": "mine.MineConfig", "AutoModelForCausalLM": "mine.MineForCausalLM"},
    )
    return source


@pytest.mark.parametrize("recipe", ["nvfp4", "w4a16_nvfp4"])
def test_remote_code_is_not_run_untrusted(
    remote: Path, refuse: Refuse, tmp_path: Path, recipe: str
) -> None:
    refuse(RemoteCodeError, remote, str(remote), "'mine'", "trust_remote_code", recipe=recipe)
    assert not (tmp_path / "marker").exists()


def test_remote_code_of_a_known_type_is_not_run_untrusted(
    damage: Any, remote: Path, tmp_path: Path, token_batches: list[Tensor]
) -> None:
    damage.config(remote, model_type="llama", architectures=["LlamaForCausalLM"])
    quantize_and_export(
        remote, export_dir=tmp_path / "out", calib_data=token_batches, progress=False
    )
    assert not (tmp_path / "marker").exists()
    assert (tmp_path / "out" / "mine.py").read_bytes() == (remote / "mine.py").read_bytes()


def test_remote_tokenizer_is_not_run_untrusted(
    checkpoint: MakeCheckpoint, refuse: Refuse, tmp_path: Path
) -> None:
    source = checkpoint("llama")
    code = f"from pathlib import Path\nPath({str(tmp_path / 'marker')!r}).touch()\n"
    (source / "tok.py").write_text(f"{code}class Tok: pass\n")
    config = {"tokenizer_class": "Tok", "auto_map": {"AutoTokenizer": ["tok.Tok", None]}}
    (source / "tokenizer_config.json").write_text(json.dumps(config))
    refuse(CalibrationError, source, "no tokenizer", calib_data=["some text"])
    assert not (tmp_path / "marker").exists()


def test_remote_code_is_run_when_trusted(
    remote: Path, tmp_path: Path, token_batches: list[Tensor]
) -> None:
    out = tmp_path / "out"
    report = quantize_and_export(
        remote,
        export_dir=out,
        recipe="fp8",
        calib_data=token_batches,
        trust_remote_code=True,
        progress=False,
    )
    assert (tmp_path / "marker").exists()
    assert len(report.quantized) == 14
    assert any("no spec for model_type 'mine'" in note for note in report.fallbacks)
    assert not [f for f in audit(out, source=remote, deep=True) if f.severity == "error"]


def test_command_line_exits_with_one(
    damage: Any, checkpoint: MakeCheckpoint, remote: Path, tmp_path: Path
) -> None:
    source = checkpoint("gemma3_text")
    out = str(tmp_path / "out")
    before = damage.listing(tmp_path)
    for arguments, code in (
        ([str(tmp_path / "nowhere")], "MOL100"),
        ([str(source), "--recipe", "nvpf4"], "MOL300"),
        ([str(source), "--export-dir", out], "MOL400"),
        ([str(source), "--recipe", "w4a16_nvfp4", "--export-dir", str(source / "x")], "MOL500"),
        ([str(remote), "--export-dir", out], "MOL600"),
    ):
        result = CliRunner().invoke(app, ["quantize", *arguments])
        assert result.exit_code == 1, (arguments, result.output)
        assert f"error [{code}]" in result.output
        assert "Traceback" not in result.output
        assert damage.listing(tmp_path) == before
