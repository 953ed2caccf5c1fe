"""docs/add_a_model.md: its commands take an unknown checkpoint with its own code to an export."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from small import make_wren

from modelopt_lite.verify.audit import audit

ROOT = Path(__file__).parents[2]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the checkpoint ``wren-moe``, written without transformers."""
    make_wren(tmp_path / "wren-moe")
    return tmp_path


def commands() -> list[str]:
    text = (ROOT / "docs" / "add_a_model.md").read_text(encoding="utf-8")
    [block] = re.findall(r"```console\n(.*?)```", text, flags=re.DOTALL)
    return [line.removeprefix("$ ") for line in block.splitlines()]


def test_three_commands_take_an_unknown_checkpoint_to_an_export(folder: Path) -> None:
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "HF_MODULES_CACHE": str(folder / "modules"),
    }
    lines = commands()
    assert len(lines) == 3
    outputs = []
    for line in lines:
        words = line.replace("modelopt-lite", f"{sys.executable} -m modelopt_lite", 1)
        made = subprocess.run(
            ["sh", "-c", words],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert made.returncode == 0, f"{line}\n{made.stdout}{made.stderr}"
        outputs.append(made.stdout)
    assert "wrote my_models/wren_moe/specs.py: 0 TODOs left" in outputs[0]
    assert "1 ok" in outputs[1]
    written = (folder / "my_models" / "wren_moe" / "specs.py").read_text()
    for fact in (
        'block_names=("WrenFlock",)',
        'linear_names=("bend", "lift", "land")',
        'gate_up_pair=("bend", "lift")',
        'router_names=("chooser",)',
        'weight_plus_one_norm_names=("WrenNorm",)',
        '("first_norm", ("self_attn.k_proj", "self_attn.q_proj", "self_attn.v_proj"))',
        'modeling_source="remote_code"',
    ):
        assert fact in written
    export = folder / "wren-moe-fp8"
    assert not audit(export, source=folder / "wren-moe", deep=True)
    tensors = load_file(export / "model.safetensors")
    for name in ("self_attn.q_proj", "flock.experts.3.land"):
        assert tensors[f"model.layers.1.{name}.weight"].dtype == torch.float8_e4m3fn
    assert tensors["model.layers.1.flock.chooser.weight"].dtype == torch.bfloat16
