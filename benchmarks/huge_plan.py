"""Plans of DeepSeek-V3 (671B) and of a model of Kimi-K2's size (1T), from config and headers alone.

The weights are holes in sparse files, of no size on the disk. Exits with 1 where a plan takes more
than 20 s of CPU or 2 GB of memory: a plan runs on one thread and reads a few MB, so that these are
its seconds on a machine that does nothing else.

    python benchmarks/huge_plan.py
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from synthetic import DEEPSEEK_V3, KIMI_K2, make_sparse_deepseek

SECONDS, BYTES = 20.0, 2 * 10**9
MODELS = {"DeepSeek-V3": DEEPSEEK_V3, "Kimi-K2": KIMI_K2}
GB = 1e9


def measure(source: Path, options: list[str]) -> tuple[dict[str, Any], float, float, int]:
    """Return a plan, the wall and the CPU seconds that it took, and its peak of memory."""
    command = [sys.executable, "-m", "modelopt_lite", "plan", str(source), "--json", *options]
    start = time.perf_counter()
    with (
        tempfile.TemporaryFile() as out,
        subprocess.Popen(command, stdout=out, stderr=subprocess.DEVNULL, cwd=source.parent) as run,
    ):
        _, _, usage = os.wait4(run.pid, 0)  # the plan exits with 1 where the disk is too small
        wall = time.perf_counter() - start
        run.returncode = 0
        out.seek(0)
        plan = json.load(out)
    return plan, wall, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024


def main() -> None:
    """Print what each plan took and what it says; exit with 1 where it took too much."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recipe", default="nvfp4")
    parser.add_argument("--read-bandwidth", default="3GB")
    parser.add_argument("--write-bandwidth", default="1GB")
    given = parser.parse_args()
    options = ["--recipe", given.recipe, "--read-bandwidth", given.read_bandwidth]
    options += ["--write-bandwidth", given.write_bandwidth]
    failed = False
    for name, config in MODELS.items():
        with tempfile.TemporaryDirectory() as folder:
            source = make_sparse_deepseek(Path(folder) / name, config)
            plan, wall, cpu, peak = measure(source, options)
        failed |= cpu > SECONDS or peak > BYTES
        foretold = plan["predicted"]
        parts = sorted(foretold["host_parts"].items(), key=lambda part: -part[1])
        print(
            f"{name}: planned in {wall:.1f} s ({cpu:.1f} s of CPU), {peak / GB:.2f} GB; "
            f"{plan['source_tensors']:,} tensors become {plan['outputs']:,}\n"
            f"  host {foretold['host'] / GB:.1f} GB ("
            + ", ".join(f"{part} {size / GB:.2f}" for part, size in parts)
            + f")\n  device {foretold['device'] / GB:.1f} GB, disk scratch "
            f"{foretold['disk_scratch'] / GB:.1f} GB\n"
            f"  read {foretold['bytes_read']:,} bytes in {foretold['seconds_reading']:,.0f} s, "
            f"write {foretold['bytes_written']:,} bytes in {foretold['seconds_writing']:,.0f} s"
        )
    sys.exit(failed)


if __name__ == "__main__":
    main()
