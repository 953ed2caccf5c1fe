"""Quantize a checkpoint of 12 GB inside 3 GB of memory.

Where the system lets it, the run is in a cgroup with the limit, in which the page cache counts;
else its high-water mark of resident memory is held against the limit. Exits with 1 where the run
exceeds the limit, is further than 15 % from its prediction, does not read each byte of the source
exactly once, or writes more than 1 % beside the export and what each layer puts out, in bfloat16,
which is kept on disk to go on from.

    python benchmarks/big_in_small.py
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from offload_memory import group_peak, in_group, memory_group
from synthetic import QWEN3_MOE, make_checkpoint

GB = 1e9
ALLOWED = 0.15
SHAPE: dict[str, Any] = {
    "hidden_size": 2048,
    "moe_intermediate_size": 768,
    "num_attention_heads": 32,
    "num_experts": 64,
    "num_key_value_heads": 4,
}
RUN = """
import json, sys, torch
from modelopt_lite import quantize_and_export
source, out, recipe, limit, rows, length = *sys.argv[1:4], *map(int, sys.argv[4:])
ids = torch.randint(0, 4096, (rows, length), generator=torch.Generator().manual_seed(0))
report = quantize_and_export(source, export_dir=out, recipe=recipe, host_memory=limit,
                             calib_data=list(ids.split(4)), progress=True)
io = dict(line.split(": ") for line in open("/proc/self/io").read().splitlines())
print(json.dumps({"written": int(io["wchar"]), "peak": report.peak_memory_bytes,
                  "predicted": report.predicted_memory_bytes,
                  "read": report.bytes_read, "source": report.source_bytes,
                  "seconds": report.seconds}))
"""


def run(source: Path, options: argparse.Namespace, limit: int) -> tuple[dict[str, Any], int | None]:
    """Return what a run under the limit reports, and the peak of its cgroup if it had one."""
    with memory_group(limit) as group:
        command = [sys.executable, "-c", RUN, str(source), str(source.parent / "out")]
        command += [options.recipe, str(limit), str(options.sequences), str(options.tokens)]
        done = subprocess.run(
            command,
            check=False,
            stdout=subprocess.PIPE,
            text=True,
            env={"OMP_WAIT_POLICY": "PASSIVE", **os.environ},
            preexec_fn=lambda: in_group(group),
        )
        if done.returncode:
            sys.exit(f"the run ended with {done.returncode} (-9: killed, over its limit)")
        result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        result["export"] = sum(file.stat().st_size for file in (source.parent / "out").iterdir())
        return result, group_peak(group)


def main() -> None:
    """Generate, run, print, and exit with 1 where a claim does not hold."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=float, default=12.0, help="GB of weights on disk")
    parser.add_argument("--limit", type=float, default=3.0, help="GB of memory")
    parser.add_argument("--recipe", default="nvfp4")
    parser.add_argument("--sequences", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=64, help="of a sequence")
    parser.add_argument("--folder", type=Path, help="where to work; default the temporary folder")
    options = parser.parse_args()
    expert = 3 * SHAPE["hidden_size"] * SHAPE["moe_intermediate_size"]
    layers = max(round(options.size * GB / (2 * expert * SHAPE["num_experts"])), 2)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        free = shutil.disk_usage(folder).free
        if free < 1.6 * options.size * GB:
            sys.exit(f"{folder} has {free / GB:.0f} GB free, too few for source and export")
        source = make_checkpoint(
            Path(folder) / "source", QWEN3_MOE, **SHAPE, num_hidden_layers=layers
        )
        result, peak = run(source, options, int(options.limit * GB))
    result["kept"] = 2 * layers * options.sequences * options.tokens * SHAPE["hidden_size"]
    sys.exit(report(result, peak, options.limit * GB))


def report(result: dict[str, Any], peak: int | None, limit: float) -> int:
    """Print a run; return how many of the claims do not hold."""
    ratio = result["peak"] / result["predicted"]
    in_cgroup = "no cgroup" if peak is None else f"cgroup {peak / GB:.2f} GB, page cache included"
    seconds = ", ".join(f"{name} {value:.0f} s" for name, value in result["seconds"].items())
    print(
        f"source {result['source'] / GB:.2f} GB; {seconds}\n"
        f"resident at the peak {result['peak'] / GB:.2f} GB, predicted "
        f"{result['predicted'] / GB:.2f} GB, ratio {ratio:.3f}; limit {limit / GB:.2f} GB "
        f"({in_cgroup})\n"
        f"read {result['read']:,} of {result['source']:,} bytes, "
        f"wrote {result['written']:,} for an export of {result['export']:,} and outputs of layers "
        f"of {result['kept']:,}"
    )
    claims = {
        "memory within the limit": result["peak"] <= limit,
        "within 15 % of the prediction": abs(ratio - 1) <= ALLOWED,
        "each byte read once": result["read"] == result["source"],
        "each byte written once": result["written"] <= 1.01 * (result["export"] + result["kept"]),
    }
    for claim, holds in claims.items():
        print(f"{'holds' if holds else 'DOES NOT HOLD'}: {claim}")
    return sum(not holds for holds in claims.values())


if __name__ == "__main__":
    main()
