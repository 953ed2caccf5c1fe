"""Run quantize_and_export in child processes, kill them at random moments, and run it again.

    python killing.py SOURCE FOLDER COUNT [RECIPE]

FOLDER holds batches.pt. A recipe that needs no calibration has units of 8 KB, and each counts as a
layer. Prints one JSON object: how many runs there were, which ended with other
bytes than an unbroken one, how many found something to go on from, and the most layers that any of
them repeated. Children are forked, so that importing is paid once; with one thread, for the pools
of others do not survive a fork.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import signal
import sys
import time
from importlib import import_module
from pathlib import Path

import torch

from modelopt_lite import job, quantize_and_export
from modelopt_lite.checkpoint.journal import JOURNAL
from modelopt_lite.recipes import load_recipe
from modelopt_lite.report import OF_THE_RUN
from modelopt_lite.tensor_units import needs_data

SOURCE, FOLDER, COUNT = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
RECIPE = sys.argv[4] if len(sys.argv) > 4 else "nvfp4"
DATA_FREE = not needs_data(load_recipe(RECIPE))
BATCHES = torch.load(FOLDER / "batches.pt")


def start(out: Path, notes: Path) -> int:
    """Fork a child that exports to ``out`` and notes each layer as it is done."""
    if pid := os.fork():
        return pid
    status = 1
    try:
        with notes.open("a") as file:

            def note(phase: str, done: int, total: int) -> None:
                if DATA_FREE or ".layers." in phase:
                    file.write(phase + "\n")
                    file.flush()

            quantize_and_export(
                SOURCE, export_dir=out, recipe=RECIPE, calib_data=BATCHES, progress=note
            )
        status = 0
    finally:
        os._exit(status)


def finish(out: Path, notes: Path) -> None:
    """Run to the end."""
    _, status = os.waitpid(start(out, notes), 0)
    if status:
        raise SystemExit(f"the child that writes {out} ended with {status}")


def hashes(folder: Path) -> dict[str, str]:
    """Hash every file but the report."""
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.iterdir()
        if path.name not in OF_THE_RUN
    }


def wait_for(notes: Path, lines: int, longest: float) -> None:
    """Wait until a child has noted so many units, however busy the machine is."""
    end = time.monotonic() + 10 * longest
    while lines and time.monotonic() < end:
        if notes.exists() and notes.read_bytes().count(b"\n") >= lines:
            return
        time.sleep(0.001)


def main() -> None:
    """Kill and go on, ``COUNT`` times."""
    if DATA_FREE:
        vars(job)["UNIT_BYTES"] = 8 << 10
    else:  # once, not in each child
        import_module("transformers.models.qwen3_moe.modeling_qwen3_moe")
    torch.set_num_threads(1)
    whole = FOLDER / "whole"
    began = time.monotonic()
    finish(whole, FOLDER / "notes")
    length = time.monotonic() - began
    units = len((FOLDER / "notes").read_text().splitlines())
    wanted, generator = hashes(whole), random.Random(0)
    different, resumed, repeated = [], 0, 0
    for index in range(COUNT):
        out, first, second = (FOLDER / f"{name}-{index}" for name in ("out", "first", "second"))
        pid = start(out, first)
        wait_for(first, generator.randrange(units), length)
        time.sleep(generator.uniform(0.0, 2.0) * length / units)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        journal = FOLDER / f".{out.name}.partial" / JOURNAL / "journal.jsonl"
        entries = journal.read_bytes().count(b"\n") - 1 if journal.exists() else 0
        resumed += entries > 0
        finish(out, second)
        if hashes(out) != wanted:
            different.append(index)
        done = first.read_text().split() if first.exists() else []
        again = second.read_text().split() if second.exists() else []
        repeated = max(repeated, len(set(done) & set(again) - {"unit"}))
        shutil.rmtree(out)
    result = {"runs": COUNT, "different": different, "resumed": resumed, "repeated": repeated}
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
