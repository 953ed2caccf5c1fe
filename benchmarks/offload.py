"""Offloaded inference side by side with accelerate's, on one model and from a cold page cache.

Each run is a process of its own, and the sides take turns, so that a machine that drifts does so
for all of them. On a CPU the weights rest on disk, on an accelerator in host memory. ``resident``
is the share of the weights that accelerate may keep on the device (its ``max_memory``). Ours,
``share``, covers the blocks that weights pass through and the weights that stay. On a CPU it is
`LEFT_BY_PEER` smaller: of what accelerate is given, it leaves room for its largest layer and maps
the embeddings. What counts is the peak of the process.

Before each forward pass, those of generate() included, the files are dropped from the page cache,
as they would be gone from it were the model larger than memory; mincore(2) tells that they are (but
for pages that stay mapped). That takes time, which is counted on no side.

    python benchmarks/offload.py
    python benchmarks/offload.py --disk-offload
    python benchmarks/offload.py --device cuda --resident 0.5 0.2 --plain

accelerate has several ways. The side it is called after here is its fastest and leanest, a device
map through ``from_pretrained``; ``--disk-offload`` adds the function ``disk_offload``.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from coldcache import cached_bytes, drop

NUMBERS = ("setup", "forward", "generate", "cpu", "peak_rss", "peak_device", "warm_bytes")
LEFT_BY_PEER = 0.24e9  # bytes, with the layers of this model: both sides then peak alike
PEER, OURS = "accelerate", "modelopt-lite"
WHOLE = "disk_offload"  # accelerate's function of that name, which keeps nothing resident


@dataclass(frozen=True, slots=True)
class Work:
    """What a run does."""

    folder: str
    device: str
    resident: float
    share: float
    tokens: int
    batches: int
    new_tokens: int
    threads: int

    @property
    def files(self) -> list[Path]:
        """The files with the weights."""
        return sorted(Path(self.folder).glob("*.safetensors"))

    def budget(self, share: float) -> int:
        """Bytes of a share of the weights."""
        return int(share * sum(file.stat().st_size for file in self.files))


class Meter:
    """Wall and processor time between two points, without what making the cache cold takes."""

    def __init__(self, work: Work, model: Any, scratch: str) -> None:
        written = sorted(Path(scratch).rglob("*.dat"))  # what accelerate reads instead
        self._files = [*work.files, *written] if work.device == "cpu" else []
        self._wall = self._cpu = 0.0
        self._not_ours = [0.0, 0.0]
        self.warm_bytes = 0
        model.register_forward_pre_hook(self._make_cold)

    def _make_cold(self, *_: Any) -> None:
        if not self._files:
            return
        wall, cpu = time.perf_counter(), time.thread_time()
        drop(self._files)
        self.warm_bytes = max(self.warm_bytes, cached_bytes(self._files))
        self._not_ours[0] += time.perf_counter() - wall
        self._not_ours[1] += time.thread_time() - cpu

    def __enter__(self) -> Meter:
        self._not_ours = [0.0, 0.0]
        self._wall, self._cpu = time.perf_counter(), time.process_time()
        return self

    def __exit__(self, *_: object) -> None:
        self._wall = time.perf_counter() - self._wall - self._not_ours[0]
        self._cpu = time.process_time() - self._cpu - self._not_ours[1]

    @property
    def seconds(self) -> tuple[float, float]:
        """Wall and processor seconds of the block that ended."""
        return self._wall, self._cpu


def load_accelerate(work: Work, scratch: str) -> Any:
    """Load with accelerate's device map: what fits, then disk (CPU) or host memory.

    Through transformers, which lets accelerate read the safetensors in place. That is the fastest
    of its three ways, with the least memory: ``disk_offload`` and ``load_checkpoint_and_dispatch``
    write a second copy of the weights, and load them all before.
    """
    import torch
    from accelerate import infer_auto_device_map, init_empty_weights
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(work.folder)
    with init_empty_weights(include_buffers=False):
        empty = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    budget = work.budget(work.resident)
    memory: dict[int | str, int] = {0: budget, "cpu": 1 << 50}
    places = infer_auto_device_map(
        empty,
        max_memory={"cpu": budget} if work.device == "cpu" else memory,
        no_split_module_classes=list(empty._no_split_modules),
        dtype=torch.bfloat16,
    )
    return AutoModelForCausalLM.from_pretrained(
        work.folder, device_map=places, offload_folder=scratch, dtype=torch.bfloat16
    )


def load_disk_offload(work: Work, scratch: str) -> Any:
    """Load, write every weight to files of its own, and read each where it is used."""
    import torch
    from accelerate import disk_offload
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(work.folder, dtype=torch.bfloat16)
    return disk_offload(model, scratch, execution_device=torch.device(work.device))


def load_ours(work: Work, scratch: str) -> Any:
    """Load from disk or to host memory, and offload to the same share of the weights."""
    import torch
    from transformers import AutoModelForCausalLM

    from modelopt_lite.offload import OffloadConfig
    from modelopt_lite.offload.device import HostDevice, current_device
    from modelopt_lite.offload.disk import disk_weights, open_from_disk
    from modelopt_lite.offload.manager import OffloadManager

    budget = work.budget(work.share)
    if work.device == "cpu":
        device: Any = HostDevice(budget)
        model = open_from_disk(AutoModelForCausalLM, work.folder)
        weights = disk_weights(model)
        assert weights is not None
        weights.read_uncached()  # as it would by itself were the model larger than memory
    else:
        device = current_device()
        model = AutoModelForCausalLM.from_pretrained(work.folder, dtype=torch.bfloat16)
    share = budget / device.memory_info().total
    config = OffloadConfig(
        include_patterns=["model.layers.*", "lm_head"],
        max_gpu_mem_fraction=min(share, 1.0),
        skip_discovery=True,
        profiling_iters=2,
    )
    return OffloadManager(device=device).offload(model, config)


def load_plain(work: Work, scratch: str) -> Any:
    """Load everything to the device."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(work.folder, dtype=torch.bfloat16)
    return model.to(work.device)


LOADERS = {
    OURS: load_ours,
    PEER: load_accelerate,
    WHOLE: load_disk_offload,
    "plain": load_plain,
}


def child(side: str, work: Work) -> dict[str, Any]:
    """Run one side once; this process does nothing else."""
    import torch
    import transformers

    torch.set_num_threads(work.threads)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    drop(work.files)
    with tempfile.TemporaryDirectory() as scratch, torch.no_grad():
        start = time.perf_counter()
        model = LOADERS[side](work, scratch).eval()
        setup = time.perf_counter() - start
        meter = Meter(work, model, scratch)
        generator = torch.Generator().manual_seed(0)
        shape = (1, work.tokens)
        vocabulary = model.config.vocab_size
        batches = [torch.randint(0, vocabulary, shape, generator=generator) for _ in range(3)]
        batches = [batch.to(work.device) for batch in batches]
        digest = hashlib.sha256()
        for batch in batches[:3]:  # the first passes, which also time the units
            model(input_ids=batch, use_cache=False)
        settle(work)
        forward, generate = [], []
        for index in range(work.batches):
            with meter:
                logits = model(input_ids=batches[index % 3], use_cache=False).logits
                settle(work)
            forward.append(meter.seconds)
            digest.update(logits.cpu().view(torch.uint8).numpy().tobytes())
        with meter:
            made = model.generate(
                batches[0],
                attention_mask=torch.ones_like(batches[0]),
                max_new_tokens=work.new_tokens,
                min_new_tokens=work.new_tokens,
                do_sample=False,
                pad_token_id=0,
            )
            settle(work)
        generate.append(meter.seconds)
        digest.update(made.cpu().numpy().tobytes())
    return {
        "setup": setup,
        "forward": statistics.mean(wall for wall, _ in forward),
        "generate": generate[0][0] / max(work.new_tokens, 1),
        "cpu": (sum(cpu for _, cpu in forward) + generate[0][1]) / (work.batches + work.new_tokens),
        "peak_rss": peak_rss(),
        "peak_device": torch.cuda.max_memory_allocated() if work.device == "cuda" else 0,
        "warm_bytes": meter.warm_bytes,
        "digest": digest.hexdigest(),
    }


def settle(work: Work) -> None:
    """Wait for an accelerator."""
    if work.device != "cpu":
        import torch

        torch.accelerator.synchronize()


def peak_rss() -> int:
    """Return the most bytes of resident memory that this process has had at once."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


def run(side: str, work: Work) -> dict[str, Any]:
    """Run one side in a new process."""
    command = [sys.executable, __file__, "--child", side, "--work", json.dumps(asdict(work))]
    done = subprocess.run(command, check=False, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(f"{side}: ended with {done.returncode}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def compare(work: Work, sides: list[str], rounds: int) -> bool:
    """Run all sides in turn, print medians and ratios, and tell whether the aim is met."""
    results: dict[str, list[dict[str, Any]]] = {side: [] for side in sides}
    for index in range(rounds):
        for side in sides if index % 2 == 0 else sides[::-1]:
            results[side].append(run(side, work))
    print(f"\n{work.resident:.0%} of the weights resident on {work.device}, medians of {rounds}")
    print(f"{'':14}  s/forward   s/token  CPU s/pass  peak RSS  setup s")
    middle = {
        side: {key: statistics.median(run[key] for run in runs) for key in NUMBERS}
        for side, runs in results.items()
    }
    for side, found in middle.items():
        print(
            f"{side:14} {found['forward']:10.3f} {found['generate']:9.3f} {found['cpu']:11.2f} "
            f"{found['peak_rss'] / 1e9:6.2f} GB {found['setup']:8.1f}  "
            f"device {found['peak_device'] / 1e9:.2f} GB, "
            f"cached before a pass {found['warm_bytes'] / 1e6:.0f} MB"
        )
    memory = "peak_device" if work.device == "cuda" else "peak_rss"
    equal = len({run["digest"] for runs in results.values() for run in runs}) == 1
    claims = {"logits and generated tokens are equal to the bit on all sides": equal}
    for peer in (side for side in sides if side in (PEER, WHOLE)):
        ratios = {
            key: middle[peer][key] / middle[OURS][key]
            for key in ("forward", "generate", "cpu", memory)
        }
        pairs = zip(results[OURS], results[peer], strict=True)
        by_round = ", ".join(f"{theirs['forward'] / mine['forward']:.2f}" for mine, theirs in pairs)
        print(f"{peer} / {OURS}: " + ", ".join(f"{k} {v:.2f}" for k, v in ratios.items()))
        print(f"forward, round by round: {by_round}")
        claims |= {
            f"forward at least twice as fast as {peer}": ratios["forward"] >= 2,
            f"generate at least twice as fast as {peer}": ratios["generate"] >= 2,
            f"at no more memory than {peer}": ratios[memory] >= 1,
        }
    for claim, holds in claims.items():
        print(f"{'holds' if holds else 'DOES NOT HOLD'}: {claim}")
    return all(claims.values())


def main() -> None:
    """Generate, run, print, and exit with 1 where the aim is not met."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--resident", type=float, nargs="+", default=[0.25])
    parser.add_argument("--share", type=float, help="ours; by default as much memory in all")
    parser.add_argument("--disk-offload", action="store_true", help="that function as a side too")
    parser.add_argument("--plain", action="store_true", help="all weights resident as a third side")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=30, help="of 50 MB")
    parser.add_argument("--tokens", type=int, default=64, help="in a batch")
    parser.add_argument("--batches", type=int, default=3)
    parser.add_argument("--new-tokens", type=int, default=6)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--folder", type=Path, help="where the checkpoint is, or is to be made")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--work", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(child(options.child, Work(**json.loads(options.work)))))
        return
    from synthetic import LLAMA, make_checkpoint

    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary) / "model"
        if not (folder / "config.json").exists():
            make_checkpoint(folder, LLAMA, num_hidden_layers=options.layers, vocab_size=32000)
        met = True
        for resident in options.resident:
            work = Work(
                folder=str(folder),
                device=options.device,
                resident=resident,
                share=options.share or resident,
                tokens=options.tokens,
                batches=options.batches,
                new_tokens=options.new_tokens,
                threads=options.threads,
            )
            if options.device == "cpu" and not options.share:
                share = max(resident - LEFT_BY_PEER / work.budget(1.0), 0.01)
                work = replace(work, share=share)
            extra = {WHOLE: options.disk_offload, "plain": options.plain}
            sides = [OURS, PEER, *(side for side, wanted in extra.items() if wanted)]
            met &= compare(work, sides, options.rounds)
    sys.exit(not met)


if __name__ == "__main__":
    main()
