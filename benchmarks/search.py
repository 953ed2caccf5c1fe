"""Speed of the search for NVFP4 block scales: ``python benchmarks/search.py [threads]``.

Searches the best of all 126 E4M3 scales for each block of one [4096, 4096] bfloat16 matrix, and
compares with a straightforward search: one fake quantization of the whole matrix for each scale,
timed on a part of the rows.
"""

from __future__ import annotations

import sys
import time

import torch
from torch import Tensor

from modelopt_lite.calibrate.sweep import best_block_scales
from modelopt_lite.formats import base, nvfp4
from modelopt_lite.formats.e2m1 import MAGNITUDES

SIZE = 4096
PART = 128  # rows of the straightforward search


def straightforward(w: Tensor, scale_2: Tensor) -> Tensor:
    """Return the index of the best scale of each block, by 126 fake quantizations."""
    x = w.float().view(-1, 16)
    scales = torch.arange(1, 127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    grid = torch.tensor(MAGNITUDES)
    losses = []
    for scale in scales:
        step = scale * scale_2
        code = torch.bucketize(x.abs() / step, (grid[1:] + grid[:-1]) / 2)
        rounded = torch.copysign(grid[code] * step, x)
        losses.append((x - rounded).square().sum(-1))
    return torch.stack(losses).argmin(0)


def main(threads: int) -> None:
    """Print both times and how many blocks agree."""
    torch.set_num_threads(threads)
    generator = torch.Generator().manual_seed(0)
    w = (torch.randn(SIZE, SIZE, generator=generator) / 50).bfloat16()
    scale_2 = nvfp4.weight_scale_2(base.amax(w))
    start = time.perf_counter()
    found = best_block_scales(w, scale_2)
    fast = time.perf_counter() - start
    start = time.perf_counter()
    expected = straightforward(w[:PART], scale_2)
    slow = (time.perf_counter() - start) * SIZE / PART
    same = (found[:PART].view(torch.uint8).long().view(-1) - 1 == expected).double().mean()
    print(f"threads {threads}: {fast:.1f} s, straightforward {slow:.0f} s: {slow / fast:.0f} times")
    print(f"blocks with the same scale: {same:.4%}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 2)
