"""Speed of every number format on one thread: ``python benchmarks/formats.py [format ...]``.

Quantizes and dequantizes one [4096, 4096] bfloat16 matrix, 7 times each, and prints the fastest as
GB of bfloat16 a second. Seconds are of the processor, so that other processes matter less.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from modelopt_lite.formats import base
from modelopt_lite.formats.linear import FORMATS

SIZE = 4096
REPEATS = 7


def fastest(run: Callable[[], Any]) -> float:
    """Return the seconds of the fastest of several runs."""
    seconds = []
    for _ in range(REPEATS):
        start = time.thread_time()
        run()
        seconds.append(time.thread_time() - start)
    return min(seconds)


def main(names: list[str]) -> None:
    """Print a table of the formats, all by default."""
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    w = (torch.randn(SIZE, SIZE, generator=generator) / 50).bfloat16()
    amax, size = base.amax(w), w.numel() * w.element_size() / 1e9
    print("| format | quantize, GB/s | dequantize, GB/s |\n|---|---|---|")
    for name in names or sorted(FORMATS):
        fmt = FORMATS[name]
        tensors = fmt.quantize(w, amax, numerics="exact")
        there = fastest(lambda fmt=fmt: fmt.quantize(w, amax, numerics="exact"))
        back = fastest(lambda fmt=fmt, t=tensors: fmt.dequantize(t, torch.bfloat16))
        print(f"| `{name}` | {size / there:.2f} | {size / back:.2f} |")


if __name__ == "__main__":
    main(sys.argv[1:])
