"""What the solver prints is kept off standard output; what others print is not."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import os, sys, ctypes
from modelopt_lite.offload.strategies.quiet import quiet_solver
print("before")
libc = ctypes.CDLL(None)
libc.puts(b"from C, before")
with quiet_solver():
    libc.puts(b"HighsMipSolverData::transformNewIntegerFeasibleSolution tmpSolver.run();")
    libc.puts(b"from C, inside")
    print("inside", flush=True)
try:
    with quiet_solver():
        raise ArithmeticError
except ArithmeticError:
    print("after", flush=True)
"""


def test_only_the_solver_is_silenced() -> None:
    run = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    assert sorted(run.stdout.split("\n")) == [
        *("", "after", "before", "from C, before", "from C, inside", "inside"),
    ]
    assert run.stderr == ""


def test_no_descriptor_is_left_open() -> None:
    from pathlib import Path

    from modelopt_lite.offload.strategies.quiet import quiet_solver

    folder = Path("/proc/self/fd")
    if not folder.is_dir():
        return
    before = len(list(folder.iterdir()))
    for _ in range(5):
        with quiet_solver():
            pass
    assert len(list(folder.iterdir())) == before
