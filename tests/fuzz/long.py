"""Fuzz each target for some minutes of processor time, and write it into docs/security.md.

    python tests/fuzz/long.py [--seconds 600] [--only NAME...] [--write]

Ends with 1, and the input that did it, where a demand of tests/helpers/fuzzing.py is not met.
"""

from __future__ import annotations

import argparse
import platform
import shutil
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path

import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests" / "helpers"))

from fuzzing import TARGETS, demands  # noqa: E402  it lies beside the tests

PAGE = ROOT / "docs" / "security.md"
BEGIN, END = "<!-- fuzz: begin -->", "<!-- fuzz: end -->"
_BATCH = 50


def fuzz(name: str, seconds: float, folder: Path) -> int:
    """Run a target on new inputs for so much processor time; return how many there were."""
    started, round_, count = time.process_time(), 0, 0
    while time.process_time() - started < seconds:
        round_ += 1

        @seed(round_)
        @settings(
            max_examples=_BATCH,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
            phases=(Phase.generate, Phase.shrink),
        )
        @given(st.data())
        def once(data: st.DataObject) -> None:
            nonlocal count
            count += 1
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            with demands(folder):
                TARGETS[name](data, folder)

        once()
    return count


def row(name: str, count: int, seconds: float) -> str:
    """What was run of one target, for the page."""
    what = (TARGETS[name].__doc__ or "").splitlines()[0].rstrip(".")
    versions = f"Python {platform.python_version()}, torch {torch.__version__}"
    cells = (
        f"`{name}`",
        what,
        f"{count:,}",
        f"{seconds / 60:.1f}",
        f"{datetime.now(UTC):%Y-%m-%d}",
    )
    return f"| {' | '.join(cells)} | {versions} |"


def write(name: str, line: str) -> None:
    """Put the row of a target between the marks of the page; other targets keep theirs."""
    page = PAGE.read_text(encoding="utf-8")
    before, _, rest = page.partition(BEGIN)
    text, _, after = rest.partition(END)
    rows = {old.split("`")[1]: old for old in text.splitlines() if old.startswith("| `")}
    rows[name] = line
    kept = [rows[target] for target in TARGETS if target in rows]
    head = "| target | what | inputs | processor minutes | on | with |"
    lines = [BEGIN, head, "| --- " * 6 + "|", *kept]
    PAGE.write_text(before + "\n".join([*lines, END]) + after, encoding="utf-8")


def main() -> None:
    """Run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=600, help="processor time of each target")
    parser.add_argument("--only", choices=TARGETS, nargs="+", help="these targets alone")
    parser.add_argument("--write", action="store_true", help="into docs/security.md")
    given_ = parser.parse_args()
    with tempfile.TemporaryDirectory() as base:
        for name in given_.only or TARGETS:
            started = time.process_time()
            count = fuzz(name, given_.seconds, Path(base) / "given")
            line = row(name, count, time.process_time() - started)
            print(line, flush=True)
            if given_.write:
                write(name, line)


if __name__ == "__main__":
    main()
