"""Kill runs at random moments (SIGKILL), go on, and compare the bytes.

Each trial starts a run, kills its process at a random moment between its first unit and its end,
and runs the same again. Exits with 1 where an export differs from that of an unbroken run, or
more than one layer is quantized twice.

    python benchmarks/kill_resume.py
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import synthetic
from ptq import MODELS

from modelopt_lite.report import OF_THE_RUN

RUN = """
import json, sys, torch
from modelopt_lite import quantize_and_export
source, out, recipe, rows, length = *sys.argv[1:4], *map(int, sys.argv[4:])
ids = torch.randint(0, 4096, (rows, length), generator=torch.Generator().manual_seed(0))
print("started", flush=True)
report = quantize_and_export(source, export_dir=out, recipe=recipe, calib_data=list(ids.split(4)),
                             progress=lambda phase, done, total: print(phase, flush=True))
print(json.dumps({"read": report.bytes_read}))
"""


@dataclass(frozen=True)
class Outcome:
    """What a run did: layers told to be finished, in order; seconds; bytes read, if it ended."""

    layers: list[str]
    seconds: float
    read: int | None


def run(command: list[str], moment: float | None = None) -> Outcome:
    """Run, from when it has started up; kill it so many seconds later, where that is given."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        start = time.perf_counter()
        if moment is not None:
            try:
                process.wait(moment)
            except subprocess.TimeoutExpired:
                process.kill()
        lines = process.stdout.read().splitlines()
        process.wait()
        seconds = time.perf_counter() - start
    if moment is None and process.returncode:
        sys.exit(f"a run ended with {process.returncode}")
    read = json.loads(lines[-1])["read"] if not process.returncode else None
    return Outcome([line for line in lines if ".layers." in line], seconds, read)


def hashes(folder: Path) -> dict[str, str]:
    """Return the hash of each file but the reports, which have the seconds that a run took."""
    found = {}
    for path in sorted(folder.iterdir()):
        if path.name not in OF_THE_RUN:
            with path.open("rb") as file:
                found[path.name] = hashlib.file_digest(file, "sha256").hexdigest()
    return found


def trial(command: list[str], out: Path, moment: float, expected: dict[str, str]) -> bool:
    """Kill, go on, compare; print a line and return whether all holds."""
    killed = run(command, moment)
    ended = killed.read is not None
    resumed = run(command)
    repeated = [layer for layer in killed.layers if layer in resumed.layers]
    same = hashes(out) == expected
    print(
        f"killed after {killed.seconds:5.1f} s with {len(killed.layers):2} layers"
        f"{' (it had ended)' if ended else ''}; resumed in {resumed.seconds:5.1f} s, "
        f"{len(resumed.layers):2} layers, {len(repeated)} repeated, read {resumed.read:,} bytes; "
        f"{'the same bytes' if same else 'OTHER BYTES'}",
        flush=True,
    )
    shutil.rmtree(out)
    return same and len(repeated) <= 1


def main() -> None:
    """Generate, run, kill, compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--recipe", default="nvfp4")
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64, help="of a sequence")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="where to work; default the temporary folder")
    options = parser.parse_args()
    draw = random.Random(options.seed)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        name, changes = MODELS["qwen3_moe"]
        source = synthetic.make_checkpoint(
            Path(folder) / "source", getattr(synthetic, name), **changes
        )
        out = Path(folder) / "out"
        command = [sys.executable, "-c", RUN, str(source), str(out), options.recipe]
        command += [str(options.sequences), str(options.tokens)]
        unbroken = run(command)
        expected = hashes(out)
        shutil.rmtree(out)
        print(f"unbroken: {unbroken.seconds:.1f} s, {len(unbroken.layers)} layers", flush=True)
        held = [
            trial(command, out, draw.uniform(0, unbroken.seconds), expected)
            for _ in range(options.times)
        ]
    print(f"{sum(held)} of {len(held)} held")
    sys.exit(not all(held))


if __name__ == "__main__":
    main()
