"""The command under torchrun."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from same_bytes import files

from modelopt_lite import quantize_and_export

TINY = Path(quantize_and_export.__code__.co_filename).parent / "data" / "tiny_qwen3_moe"
GIVEN = ("--recipe", "fp8", "--calib-size", "3", "--calib-seq-len", "32", "--batch-size", "1")


ENV = {**os.environ, "OMP_NUM_THREADS": "1"}


def torchrun(*arguments: object) -> subprocess.Popen[str]:
    """Start torchrun, or one of its nodes."""
    command = [sys.executable, "-m", "torch.distributed.run", *map(str, arguments)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=ENV, stdout=pipe, stderr=pipe, text=True)


@pytest.fixture
def alone(tmp_path: Path) -> Path:
    """Return the export of one process."""
    folder = tmp_path / "alone"
    command = [sys.executable, "-m", "modelopt_lite", "quantize", TINY, *GIVEN, "-o", folder]
    subprocess.run(list(map(str, command)), env=ENV, check=True, capture_output=True)
    return folder


@pytest.mark.dist
def test_torchrun(alone: Path, tmp_path: Path) -> None:
    here = ("--standalone", "--nproc-per-node", 2, "-m", "modelopt_lite", "quantize", TINY, *GIVEN)
    done = torchrun(*here, "-o", tmp_path / "b")
    stdout, stderr = done.communicate()
    assert not done.returncode, stderr
    assert files(alone) == files(tmp_path / "b")
    assert stdout.count("bits per weight") == 1  # one report, of rank 0
    refused = torchrun(*here, "-o", tmp_path / "b", "--ep", 3)
    _, stderr = refused.communicate()
    assert refused.returncode
    assert "error [MOL300]: ep is 3" in stderr
    assert "Traceback" not in stderr.partition("error [")[2].partition("\n")[0]


@pytest.mark.dist
def test_two_nodes(alone: Path, tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    flags: list[object] = ["--nnodes", 2, "--nproc-per-node", 1, "--rdzv-backend", "c10d"]
    flags += ["--rdzv-endpoint", f"127.0.0.1:{port}", "--local-addr", "127.0.0.1"]
    run = ("-m", "modelopt_lite", "quantize", TINY, *GIVEN, "-o", tmp_path / "b")
    nodes = [torchrun(*flags, *run) for _ in range(2)]
    ends = [node.communicate() for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], ends
    assert files(alone) == files(tmp_path / "b")
