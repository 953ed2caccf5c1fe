"""The heap neither grows by what does not stay, nor costs time, whatever the process has done."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

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


BUILT = """
import json, mmap, sys
from pathlib import Path
from modelopt_lite.process import use_huge_pages

use_huge_pages()
from modelopt_lite.build import build_meta_model

config = {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 512,
          "intermediate_size": 1024, "moe_intermediate_size": 384, "num_experts": 32,
          "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 4096,
          "dtype": "bfloat16", "tie_word_embeddings": False}
sizes = []
for layers in (2, 30):
    folder = Path(sys.argv[1]) / str(layers)
    folder.mkdir()
    config["num_hidden_layers"] = layers
    (folder / "config.json").write_text(json.dumps(config))
    build_meta_model(folder, config, trust_remote_code=False)
    sizes.append(int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE)
print(sizes[1] - sizes[0])
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="heap of glibc")
def test_parameters_that_are_real_for_a_moment_leave_the_heap_alone(tmp_path: Path) -> None:
    """The heap ended where the largest of them had lain, modules between them."""
    command = [sys.executable, "-c", BUILT, str(tmp_path)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert int(done.stdout) < 6 << 20  # it was 9 to 21 MB


HUGE = """
import torch
from modelopt_lite.process import use_huge_pages

use_huge_pages()
from modelopt_lite.offload import memory

libc = memory._glibc()
libc.mallopt(-3, 32 << 20)  # from the heap
kept = [torch.ones(8 << 20, dtype=torch.uint8) for _ in range(4)]


def asked():
    flags, heap = [], False
    for line in open("/proc/self/smaps"):
        if "-" in line.split()[0] and ":" not in line.split()[0]:
            heap = line.rstrip().endswith("[heap]")
        elif heap and line.startswith("VmFlags:"):
            flags.append("hg" in line.split())
    return any(flags)


before = asked()
del kept[:]
memory.bound_caches()
print(before, asked())
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="heap of glibc")
def test_huge_pages_stay_out_of_the_heap() -> None:
    """The system goes on to put them where a tensor was, and fills holes with them."""
    done = subprocess.run([sys.executable, "-c", HUGE], check=True, capture_output=True, text=True)
    before, after = done.stdout.split()
    if before == "False":
        pytest.skip("the system has no huge pages")
    assert after == "False"


ODD = """
import mmap, os, sys
from modelopt_lite.offload import memory

path = os.fsencode(sys.argv[1]) + b"/ren\\xe9"
with open(path, "wb") as file:
    file.write(bytes(mmap.PAGESIZE))
with open(path, "rb") as file:
    kept = mmap.mmap(file.fileno(), mmap.PAGESIZE, prot=mmap.PROT_READ)
memory.bound_caches()
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="heap of glibc")
def test_a_mapped_file_may_have_any_name(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", ODD, str(tmp_path)], check=True)
