"""Peak memory of a run against the number of layers: it must not grow; and seconds a layer.

Each run is a process of its own; its high-water mark of resident memory is what counts.

    python benchmarks/memory_depth.py
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from synthetic import LLAMA, QWEN3_MOE, make_checkpoint

RUN = """
import json, sys, torch
from modelopt_lite import quantize_and_export
source, out, recipe = sys.argv[1:4]
ids = torch.randint(0, 4096, (16, 256), generator=torch.Generator().manual_seed(0))
report = quantize_and_export(source, export_dir=out, recipe=recipe, calib_data=list(ids.split(4)),
                             progress=False)
print(json.dumps({"peak": report.peak_memory_bytes, "seconds": sum(report.seconds.values()),
                  "read": report.bytes_read, "source": report.source_bytes}))
"""


def measure(source: Path, recipe: str) -> dict[str, float]:
    """Run once in a new process and return what it reports."""
    with tempfile.TemporaryDirectory(dir=source.parent) as folder:
        command = [sys.executable, "-c", RUN, str(source), f"{folder}/out", recipe]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def main() -> None:
    """Print a line for each run, and exit with 1 where memory grew by 5 % or more."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, nargs=2, default=(8, 32))
    parser.add_argument("--recipes", nargs="+", default=("fp8", "nvfp4"))
    options = parser.parse_args()
    worst = 0.0
    with tempfile.TemporaryDirectory() as folder:
        for name, base in (("qwen3_moe", QWEN3_MOE), ("llama", LLAMA)):
            sources = [
                make_checkpoint(Path(folder) / f"{name}-{n}", base, num_hidden_layers=n)
                for n in options.layers
            ]
            for recipe in options.recipes:
                few, many = (measure(source, recipe) for source in sources)
                growth = many["peak"] / few["peak"] - 1
                worst = max(worst, growth)
                each = [
                    run["seconds"] / count
                    for run, count in zip((few, many), options.layers, strict=True)
                ]
                print(
                    f"{name:10} {recipe:6} {options.layers[0]:3} layers "
                    f"{few['peak'] / 2**20:7.0f} MiB, {options.layers[1]:3} layers "
                    f"{many['peak'] / 2**20:7.0f} MiB, growth {growth:+.1%}; "
                    f"{each[0]:.2f} and {each[1]:.2f} s a layer "
                    f"({each[1] / each[0] - 1:+.1%}), source bytes read "
                    f"{many['read'] / many['source']:.3f} x"
                )
    sys.exit(worst >= 0.05)


if __name__ == "__main__":
    main()
