"""What is set for the heap costs no time, whatever the process has done before."""

from __future__ import annotations

import subprocess
import sys

import pytest

FRAGMENTED = """
import ctypes, random, time
from modelopt_lite.offload import memory

libc = memory._glibc()
libc.mallopt(-3, 32 << 20)  # all of them from the heap
random.seed(0)
blocks = [libc.malloc(random.choice((200, 3000, 70000, 300000))) for _ in range(30000)]
for block in blocks[::2]:
    libc.free(ctypes.c_void_p(block))
free = libc.mallinfo2().fordblks
started = time.process_time()
memory.bound_caches()
print(free >> 20, libc.mallinfo2().fordblks >> 20, time.process_time() - started)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="heap of glibc")
def test_filling_the_holes_of_a_large_heap_takes_no_time() -> None:
    done = subprocess.run(
        [sys.executable, "-c", FRAGMENTED], check=True, capture_output=True, text=True
    )
    before, after, seconds = map(float, done.stdout.split())
    assert before > 1000  # MB in holes
    assert after < before / 5
    assert seconds < 20  # it took minutes when each hole was found by walking all
