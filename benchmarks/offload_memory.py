"""Run a model of 4 GB from disk inside 1.5 GB of memory, with a cold page cache.

A process with one compute thread and the runtime's one copy thread runs passes over a generated
model. Where the system lets it, the process is in a cgroup with the limit (page cache counts);
else its high-water mark of resident memory is held against the limit.

Three things are shown: the run stays within the limit, every weight that is offloaded is read once
a pass, and reading overlaps with computing: wall <= 1.15 x max(read, compute), each the median of
several passes: disks and shared machines drift by more than that from one pass to the next.

    python benchmarks/offload_memory.py --size 4 --limit 1.5
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

GROUP = "modelopt-lite-benchmark"
LAYER = {"hidden_size": 2048, "intermediate_size": 7168, "num_attention_heads": 16}


def generate(folder: Path, size: float) -> Path:
    """Write a checkpoint of about ``size`` GB, all of it layers of 110 MB."""
    from synthetic import LLAMA, make_checkpoint

    hidden, wide = LAYER["hidden_size"], LAYER["intermediate_size"]
    layer = 2 * (2.5 * hidden * hidden + 3 * hidden * wide)
    return make_checkpoint(
        folder,
        LLAMA,
        **LAYER,
        num_key_value_heads=4,
        num_hidden_layers=max(round(size * 1e9 / layer), 2),
    )


def child(folder: Path, passes: int, tokens: int, budget: int) -> dict[str, Any]:
    """Run the model; this process is under the limit."""
    import torch
    import transformers

    from modelopt_lite.offload.config import OffloadConfig
    from modelopt_lite.offload.device import HostDevice
    from modelopt_lite.offload.disk import disk_weights, open_from_disk
    from modelopt_lite.offload.manager import OffloadManager, Phase

    torch.set_num_threads(1)
    model = open_from_disk(transformers.LlamaForCausalLM, folder)
    weights = disk_weights(model)
    assert weights is not None
    manager = OffloadManager(device=HostDevice(budget))
    config = OffloadConfig(
        include_patterns=["model.layers.*"], profiling_iters=3, max_gpu_mem_fraction=1.0
    )
    manager.offload(model, config)
    ids = torch.randint(0, 4096, (1, tokens), generator=torch.Generator().manual_seed(0))
    device = manager._device
    with torch.no_grad():
        while manager.phase is not Phase.INFERENCE:
            weights.drop_cache()
            model(input_ids=ids, use_cache=False)
        tensors = manager.get_tensor_manager()
        reads = [read_alone(tensors, weights) for _ in range(2)]
        model(input_ids=ids, use_cache=False)  # at its end, copies for the next are under way
        device.synchronize()
        weights.source.reads.clear()
        before, walls = weights.source.bytes_read, []
        delay = run_delay()
        for _ in range(passes):
            weights.drop_cache()
            start = time.perf_counter()
            model(input_ids=ids, use_cache=False)
            walls.append(time.perf_counter() - start)
        delay = (run_delay() - delay) / passes
        device.synchronize()
    offloaded = (weights.source.bytes_read - before) / passes
    counts = {count / passes for count in weights.source.reads.values()}
    compute = sum(s.duration for s in tensors.layer_statistics_collector.get_layer_stats()) / 1e3
    reads += [read_alone(tensors, weights) for _ in range(2)]  # before and after: disks drift
    usage = manager.get_gpu_memory_usage()
    counters = tensors.loader.counts
    units = len(manager.offload_units())
    manager.release()
    return {
        "wall": statistics.median(walls),
        "walls": walls,
        "delay": delay,
        "read": statistics.median(reads),
        "compute": compute,
        "bytes_per_pass": offloaded,
        "reads_of_a_tensor_per_pass": sorted(counts),
        "blocks": usage.blocks_bytes,
        "kept": usage.unmapped_tensors_bytes,
        "units": units,
        "misses": counters.misses,
        "peak_rss": peak_rss(),
    }


def read_alone(tensors: Any, weights: Any) -> float:
    """Seconds that one pass's bytes take to be read with nothing else going on."""
    from modelopt_lite.offload.device import HostDevice

    weights.drop_cache()
    room = HostDevice().allocate(max(c.nbytes for c in tensors._cargos.values()))
    room.zero_()  # the time of its first use is not the disk's
    start = time.perf_counter()
    for cargo in tensors._cargos.values():
        cargo.source.read_into(room[: cargo.nbytes])
    return time.perf_counter() - start


def run_delay() -> float:
    """Seconds that this thread, which computes, was ready to run and had no core."""
    with suppress(OSError):
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
    return 0.0


def peak_rss() -> int:
    """Return the most bytes of anonymous and mapped memory that this process has had at once."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


@contextmanager
def memory_group(limit: int) -> Iterator[Path | None]:
    """Make a cgroup with a limit (version 2, else version 1); None where that is not allowed."""
    group = _make_group(limit)
    try:
        yield group
    finally:
        if group is not None:
            group.rmdir()


def _make_group(limit: int) -> Path | None:
    root = Path("/sys/fs/cgroup")
    for base, file in ((root, "memory.max"), (root / "memory", "memory.limit_in_bytes")):
        if not (base / "cgroup.procs").exists():
            continue
        group = base / f"{GROUP}-{os.getpid()}"
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            (group / file).write_text(str(limit))
        except OSError:
            group.rmdir()
            continue
        with suppress(OSError):  # no swap: it would hide what does not fit
            (group / "memory.swap.max").write_text("0")
        return group
    return None


def in_group(group: Path | None) -> None:
    """Enter a cgroup; called in the new process before it runs anything."""
    if group is not None:
        (group / "cgroup.procs").write_text(str(os.getpid()))


def group_peak(group: Path | None) -> int | None:
    """Return the most bytes that a group has used, page cache included."""
    for file in ("memory.peak", "memory.max_usage_in_bytes"):
        with suppress(OSError, TypeError):
            return int((group / file).read_text())  # type: ignore[operator]
    return None


def main() -> None:
    """Generate, run, print, and exit with 1 where a claim does not hold."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=float, default=4.0, help="GB of weights on disk")
    parser.add_argument("--limit", type=float, default=1.5, help="GB of memory")
    parser.add_argument("--budget", type=float, default=0.6, help="GB for blocks and what stays")
    parser.add_argument("--passes", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--folder", type=Path, help="where the checkpoint is, or is to be made")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        made = child(options.folder, options.passes, options.tokens, int(options.budget * 1e9))
        print(json.dumps(made))
        return
    limit = int(options.limit * 1e9)
    with tempfile.TemporaryDirectory() as temporary, memory_group(limit) as group:
        folder = options.folder or Path(temporary) / "model"
        if not (folder / "config.json").exists():
            generate(folder, options.size)
        command = [sys.executable, __file__, "--child", "--folder", str(folder)]
        command += ["--passes", str(options.passes), "--tokens", str(options.tokens)]
        command += ["--budget", str(options.budget)]
        done = subprocess.run(
            command,
            check=False,
            stdout=subprocess.PIPE,
            text=True,
            preexec_fn=lambda: in_group(group),
        )
        size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
        if done.returncode:
            sys.exit(f"the run ended with {done.returncode} (-9: killed, over its limit)")
        result = json.loads(done.stdout.splitlines()[-1])
        sys.exit(report(result, size, limit, group_peak(group) if group else None))


def report(result: dict[str, Any], size: int, limit: int, peak: int | None) -> int:
    """Print a run; return how many of the claims do not hold."""
    gb, pace = 1e9, max(result["read"], result["compute"])
    used = result["peak_rss"] if peak is None else peak
    offloaded = result["bytes_per_pass"]
    print(f"model {size / gb:.2f} GB in {result['units']} units")
    how = "cgroup, page cache included" if peak is not None else "high-water mark"
    print(
        f"memory: {used / gb:.2f} of {limit / gb:.2f} GB ({how}); "
        f"high-water mark of the process {result['peak_rss'] / gb:.2f} GB, of that blocks "
        f"{result['blocks'] / gb:.2f} GB and weights that stay {result['kept'] / gb:.2f} GB"
    )
    print(
        f"read per pass: {offloaded / gb:.2f} GB; each tensor that is offloaded was read "
        f"{result['reads_of_a_tensor_per_pass']} times a pass; misses {result['misses']}"
    )
    print(
        f"wall {result['wall']:.2f} s a pass; reading alone {result['read']:.2f} s "
        f"({offloaded / result['read'] / gb:.2f} GB/s), computing alone "
        f"{result['compute']:.2f} s; wall / max {result['wall'] / pace:.3f}, medians; passes took "
        + ", ".join(f"{wall:.2f}" for wall in result["walls"])
    )
    if result["delay"] > 0.05 * result["wall"]:
        print(
            f"the machine was busy: computing waited {result['delay']:.2f} s a pass for a core, "
            "so that wall says little; run it on an idle machine with two cores"
        )
    claims = {
        "memory within the limit": used <= limit,
        "each weight read once a pass": result["reads_of_a_tensor_per_pass"] == [1],
        "wall <= 1.15 x max(read, compute)": result["wall"] <= 1.15 * pace,
    }
    for claim, holds in claims.items():
        print(f"{'holds' if holds else 'DOES NOT HOLD'}: {claim}")
    return sum(not holds for holds in claims.values())


if __name__ == "__main__":
    main()
