"""The command under torchrun."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from same_bytes import files

from modelopt_lite import quantize_and_export

TINY = Path(quantize_and_export.__code__.co_filename).parent / "data" / "tiny_qwen3_moe"
GIVEN = ("--recipe", "fp8", "--calib-size", "3", "--calib-seq-len", "32", "--batch-size", "1")


def torchrun(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Run the command on two processes of one thread."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", "-m", "modelopt_lite", *map(str, arguments)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False)


@pytest.mark.dist
def test_torchrun(tmp_path: Path) -> None:
    alone = [sys.executable, "-m", "modelopt_lite", "quantize", TINY, *GIVEN, "-o", tmp_path / "a"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(list(map(str, alone)), env=env, check=True, capture_output=True)
    done = torchrun("quantize", TINY, *GIVEN, "-o", tmp_path / "b")
    assert not done.returncode, done.stderr
    assert files(tmp_path / "a") == files(tmp_path / "b")
    assert done.stdout.count("bits per weight") == 1  # one report, of rank 0
    refused = torchrun("quantize", TINY, *GIVEN, "-o", tmp_path / "b", "--ep", "3")
    assert refused.returncode
    assert "error [MOL300]: ep is 3" in refused.stderr
    assert "Traceback" not in refused.stderr.partition("error [")[2].partition("\n")[0]
