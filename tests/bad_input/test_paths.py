"""Paths that no system has: each command says so in its own words, wherever it takes a path."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

import modelopt_lite
from modelopt_lite.cli import app

TINY = str(Path(modelopt_lite.__file__).parent / "data" / "tiny_qwen3_moe")
NEVER = {
    "a name too long": "a" * 300,
    "a path too long": "a/" * 3000,
    "a zero byte": "a\0b",
    "no such home": "~nobody-of-this-name/x",
}
COMMANDS = {
    "checkpoint": ["plan", "{}"],
    "export_dir": ["plan", TINY, "-r", "fp8_per_channel_per_token", "-o", "{}"],
    "recipe": ["plan", TINY, "-r", "{}.yaml"],
    "calib_data": ["plan", TINY, "-r", "fp8", "--calib-data", "{}"],
    "search_dir": ["plan", TINY, "-r", "auto_weight_only", "--search-dir", "{}"],
    "offload_config": ["plan", TINY, "--offload-config", "{}"],
    "verify": ["verify", "{}"],
    "verify a source": ["verify", TINY, "--source", "{}"],
    "verify a text": ["verify", TINY, "--source", TINY, "--deep", "--text", "{}"],
    "verify and record": ["verify", "{}", "--source", "x", "--deep", "--text", "x", "--record"],
    "diff": ["diff", "{}", TINY],
    "diff with": ["diff", TINY, "{}"],
    "push": ["push", "{}", "owner/name", "--dry-run"],
    "eval": ["eval", "{}"],
    "eval a text": ["eval", TINY, "--text", "{}", "--no-progress"],
    "keep": ["eval", TINY, "--keep", "{}", "--max-tokens", "8", "--no-progress"],
    "against": ["eval", TINY, "--against", "{}", "--max-tokens", "8", "--no-progress"],
    "record": ["eval", "{}", "--record"],
    "specs new": ["specs", "new", "{}", "--to", "x"],
    "specs new to": ["specs", "new", "llama", "--to", "{}"],
    "specs check": ["specs", "check", "llama", "--ckpt", "{}"],
}


@pytest.mark.parametrize("kind", NEVER)
@pytest.mark.parametrize("command", COMMANDS)
def test_a_path_that_cannot_be(command: str, kind: str) -> None:
    result = CliRunner().invoke(app, [word.format(NEVER[kind]) for word in COMMANDS[command]])
    assert isinstance(result.exception, SystemExit), result.exception
    assert result.exit_code in {1, 2}
    assert "error [MOL" in result.output


@pytest.mark.parametrize(
    "options",
    [
        ["--calib-size", "0"],
        ["--calib-seq-len", "1"],
        ["--batch-size", "-1"],
        ["--ep", "0"],
        ["--world-size", "0"],
        ["--world-size", "-3"],
    ],
)
def test_numbers_that_mean_nothing_are_refused_when_planned(options: list[str]) -> None:
    result = CliRunner().invoke(app, ["plan", TINY, *options])
    assert result.exit_code == 1
    assert "error [MOL" in result.output
    assert "at least 1" in result.output
