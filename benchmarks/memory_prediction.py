"""The peak of memory that a plan foretells against the peak of the run.

Models of several widths and depths, and several numbers of tokens, each run in a process of its
own: its high-water mark of resident memory is what counts. Exits with 1 where one is further than
15 % from what was foretold.

    python benchmarks/memory_prediction.py
    python benchmarks/memory_prediction.py --recipes int4_gptq nvfp4_awq_lite nvfp4_svdquant
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from synthetic import LLAMA, QWEN3_MOE, make_checkpoint

ALLOWED = 0.15
RUN = """
import json, sys, torch
from modelopt_lite import quantize_and_export
source, out, recipe, batches, rows, length = *sys.argv[1:4], *map(int, sys.argv[4:])
generator = torch.Generator().manual_seed(0)
ids = torch.randint(0, 4096, (batches * rows, length), generator=generator)
report = quantize_and_export(source, export_dir=out, recipe=recipe,
                             calib_data=list(ids.split(rows)), progress=False)
print(json.dumps({"peak": report.peak_memory_bytes, "predicted": report.predicted_memory_bytes}))
"""
WIDE_MOE = {
    "hidden_size": 1024,
    "num_experts": 48,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
}
NARROW = {"hidden_size": 512, "intermediate_size": 1536, "num_attention_heads": 8}
WIDE = {"hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 16}
MODELS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "qwen3_moe 512 x 4": (QWEN3_MOE, {"num_hidden_layers": 4}),
    "qwen3_moe 512 x 12": (QWEN3_MOE, {"num_hidden_layers": 12}),
    "qwen3_moe 1024 x 4": (QWEN3_MOE, {**WIDE_MOE, "num_hidden_layers": 4}),
    "llama 512 x 8": (LLAMA, {**NARROW, "num_hidden_layers": 8}),
    "llama 1536 x 6": (LLAMA, {"num_hidden_layers": 6}),
    "llama 2048 x 4": (LLAMA, {**WIDE, "num_hidden_layers": 4}),
}
# Recipe; batches, sequences in a batch, tokens of a sequence.
RUNS = (
    ("nvfp4", (1, 1, 64)),
    ("fp8", (4, 4, 256)),
    ("nvfp4", (4, 8, 512)),
    ("w4a16_nvfp4", (1, 1, 64)),
)


def measure(source: Path, recipe: str, batches: tuple[int, int, int]) -> dict[str, int]:
    """Run once in a new process and return what it reports."""
    with tempfile.TemporaryDirectory(dir=source.parent) as folder:
        command = [sys.executable, "-c", RUN, str(source), f"{folder}/out", recipe]
        command += map(str, batches)
        done = subprocess.run(command, check=True, capture_output=True, text=True)
    result: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    return result


def main() -> None:
    """Print a line for each run, and exit with 1 where a prediction is too far off."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=tuple(MODELS), choices=tuple(MODELS))
    parser.add_argument("--recipes", nargs="+", help="with 16 sequences of 256 tokens each")
    options = parser.parse_args()
    runs = [(recipe, (4, 4, 256)) for recipe in options.recipes or ()] or RUNS
    worst = 0.0
    print(f"{'model':20} {'recipe':12} {'tokens':>12} {'predicted':>12} {'measured':>12} ratio")
    for name in options.models:
        base, changes = MODELS[name]
        with tempfile.TemporaryDirectory() as folder:
            source = make_checkpoint(Path(folder) / "source", base, **changes)
            for recipe, batches in runs:
                found = measure(source, recipe, batches)
                ratio = found["peak"] / found["predicted"]
                worst = max(worst, abs(ratio - 1))
                print(
                    f"{name:20} {recipe:12} {'x'.join(map(str, batches)):>12} "
                    f"{found['predicted'] / 2**20:8.0f} MiB {found['peak'] / 2**20:8.0f} MiB "
                    f"{ratio:5.3f}",
                    flush=True,
                )
    print(f"furthest off: {worst:.1%}")
    sys.exit(worst > ALLOWED)


if __name__ == "__main__":
    main()
