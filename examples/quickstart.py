"""Quantize the checkpoint that ships with the package, audit it, and see what it costs.

    nox -s quickstart

A trained mixture of experts of 4 million parameters becomes FP8 and NVFP4; perplexity is measured
on text that neither the training nor the calibration has seen.
"""

from __future__ import annotations

import argparse
import importlib.resources
import sys
import tempfile
import time
from pathlib import Path

from comparison import Row, audit, measure, print_rows, quantize
from rich.console import Console

MODEL = "tiny_qwen3_moe"
RECIPES = ("fp8", "nvfp4")
MAX_TOKENS = 32768
SEQ_LEN = 256


def main() -> int:
    """Quantize, audit and evaluate with each recipe; print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, help="keep the exports here; default: remove them")
    folder: Path | None = parser.parse_args().folder
    with tempfile.TemporaryDirectory() as temporary:
        run(folder or Path(temporary))
    return 0


def run(folder: Path) -> None:
    """Write the exports into ``folder``."""
    console, start = Console(), time.perf_counter()
    source = Path(str(importlib.resources.files("modelopt_lite"))) / "data" / MODEL
    console.print(f"source: {source}", soft_wrap=True)
    before = measure(source, max_tokens=MAX_TOKENS, seq_len=SEQ_LEN)
    rows = []
    for recipe in RECIPES:
        export = folder / f"{MODEL}-{recipe}"
        report = quantize(source, export, recipe, "--calib-seq-len", str(SEQ_LEN))
        console.print(f"audit of {audit(export, source)}", soft_wrap=True)
        rows.append(Row.of(report, before, measure(export, max_tokens=MAX_TOKENS, seq_len=SEQ_LEN)))
    print_rows(rows, f"{MODEL}, {before['tokens']:,} tokens of unseen text", console)
    console.print(f"{time.perf_counter() - start:.0f} seconds in all")


if __name__ == "__main__":
    sys.exit(main())
