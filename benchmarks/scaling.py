"""How long a run on several processes takes: a model of its time, its fit, and what it foretells.

The seconds of a run are those of its slowest rank:

    fixed + read / R + products / C + quantized / Q + exchanged / X + written / W

``read`` are the bytes that rank 0 reads (its share of the experts and all the rest), ``products``
the operations of its batches, ``quantized`` the weights that it quantizes, ``exchanged`` the bytes
of rows that leave it and come back, ``written`` those that all ranks write to one disk.

    python benchmarks/scaling.py measure   # small runs here over gloo, and the rates that fit them
    python benchmarks/scaling.py experts   # memory and bytes read of each rank, by the degree
    python benchmarks/scaling.py predict   # DeepSeek-V3 and Kimi-K2 on 1, 8 and 64 GPUs
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields
from math import gcd
from pathlib import Path
from typing import Any

from synthetic import DEEPSEEK_V3, KIMI_K2, QWEN3_MOE, make_checkpoint

RANKS_OF_A_NODE = 8
TOKENS = 512  # of a batch of the small runs
SMALL = {**QWEN3_MOE, "num_hidden_layers": 8}


@dataclass(frozen=True)
class Work:
    """What the slowest rank of a run does."""

    fixed: float
    read: float
    products: float
    quantized: float
    exchanged: float
    written: float

    def seconds(self, rates: Sequence[float]) -> list[float]:
        """Seconds of each part; ``rates`` are seconds, then units a second."""
        amounts = [getattr(self, field.name) for field in fields(self)]
        parts = [rates[0] * amounts[0]]
        parts += [a / r if r else 0.0 for a, r in zip(amounts[1:], rates[1:], strict=True)]
        return parts


@dataclass(frozen=True)
class Shape:
    """Weights of a model, in values; of one layer where it says so."""

    experts: int
    chosen: int
    hidden: int
    sparse_layers: int
    expert: int  # one expert of one layer
    rest: int  # all that is no routed expert, but for embedding and head
    outside: int  # embedding and head

    @classmethod
    def of(cls, config: dict[str, Any]) -> Shape:
        """Read a config of Qwen3-MoE or DeepSeek-V3."""
        hidden, layers = config["hidden_size"], config["num_hidden_layers"]
        experts = config.get("num_experts") or config["n_routed_experts"]
        dense = config.get("first_k_dense_replace", 0)
        expert = 3 * hidden * config["moe_intermediate_size"]
        heads = config["num_attention_heads"]
        if "q_lora_rank" in config:
            rank, low = config["q_lora_rank"], config["kv_lora_rank"]
            nope, rope, value = (
                config[k] for k in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
            )
            attention = hidden * rank + rank * heads * (nope + rope) + hidden * (low + rope)
            attention += low * heads * (nope + value) + heads * value * hidden
        else:
            size = config["head_dim"]
            attention = 2 * hidden * size * (heads + config["num_key_value_heads"])
        shared = config.get("n_shared_experts", 0) * expert
        rest = layers * attention + dense * 3 * hidden * config["intermediate_size"]
        rest += (layers - dense) * (shared + experts * hidden)
        outside = 2 * config["vocab_size"] * hidden
        chosen = config["num_experts_per_tok"]
        return cls(experts, chosen, hidden, layers - dense, expert, rest, outside)

    def work(
        self, ranks: int, tokens: int, bytes_in: float, bytes_out: float, *, one_disk: bool
    ) -> Work:
        """Return what the slowest rank does.

        Args:
            ranks: How many there are; experts are shared by as many as divide both.
            tokens: Of all batches.
            bytes_in: A value's bytes in the source; embedding and head have 2.
            bytes_out: And in the export.
            one_disk: All ranks read from one disk; else each node of eight has its own.
        """
        ep = gcd(ranks, self.experts)
        all_experts = self.sparse_layers * self.experts * self.expert
        own = all_experts / ep
        share = tokens / ranks
        active = self.rest + self.sparse_layers * self.chosen * self.expert
        sharing = ranks if one_disk else min(ranks, RANKS_OF_A_NODE)
        rows = share * self.chosen * (ep - 1) / ep * self.sparse_layers
        outside = 2.0 * self.outside
        return Work(
            fixed=1.0,
            read=sharing * (bytes_in * (self.rest + own) + outside),
            products=2 * share * active,
            quantized=self.rest + own,
            exchanged=2 * 2 * self.hidden * rows,
            written=bytes_out * (self.rest + all_experts) + outside,
        )


def run_here(
    source: Path, out: Path, ranks: int, batches: int, ep: int | None = None
) -> dict[str, Any]:
    """Return the seconds of a run of processes on a core each, and what each rank took."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-c", _CHILD, str(source), str(out), str(batches), str(ep or 0)]
    processes = []
    for rank in range(ranks):
        environment: dict[str, object] = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks}
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": 1}
        env = {**os.environ, **{k: str(v) for k, v in environment.items()}}
        processes.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE))
    texts = [process.communicate()[0] for process in processes]
    if any(process.returncode for process in processes):
        sys.exit("a run failed")
    shutil.rmtree(out)
    told: dict[str, Any] = json.loads(texts[0].splitlines()[-1])
    return told


_CHILD = f"""
import json, os, sys, time, torch
cores = sorted(os.sched_getaffinity(0))
os.sched_setaffinity(0, [cores[int(os.environ["RANK"]) % len(cores)]])  # threads that write, too
import transformers.models.qwen3_moe.modeling_qwen3_moe, modelopt_lite.api
generator = torch.Generator().manual_seed(0)
count = int(sys.argv[3])
batches = [torch.randint(3, 4000, (1, {TOKENS}), generator=generator) for _ in range(count)]
start = time.perf_counter()
report = modelopt_lite.api.quantize_and_export(
    sys.argv[1], export_dir=sys.argv[2], recipe="nvfp4", calib_data=batches, progress=False,
    verify=False, ep=int(sys.argv[4]) or None,
)
told = dict(seconds=time.perf_counter() - start, ranks=report.ranks)
print(json.dumps(told))
"""


def measure(given: argparse.Namespace) -> None:
    """Run small models here, and fit the rates."""
    rows, seconds, labels = [], [], []
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        for experts in given.experts:
            config = {**SMALL, "num_experts": experts}
            source = make_checkpoint(Path(folder) / f"source{experts}", config)
            for ranks, batches in itertools.product(given.ranks, given.batches):
                runs = [
                    run_here(source, Path(folder) / "out", ranks, batches)["seconds"]
                    for _ in range(given.rounds)
                ]
                work = Shape.of(config).work(ranks, TOKENS * batches, 2, 0.5625, one_disk=True)
                rows.append([getattr(work, field.name) for field in fields(work)])
                seconds.append(min(runs))
                labels.append(f"experts {experts:3d}  ranks {ranks}  batches {batches:2d}")
                print(f"{labels[-1]}  {'  '.join(f'{run:.2f}' for run in runs)} s", flush=True)
    costs = fit(rows, seconds)
    for field, cost in zip(fields(Work), costs, strict=True):
        rate = "takes no time that shows" if not cost else f"{1 / cost:.3g} a second"
        print(f"{field.name:10s} {f'{cost:.2f} s' if field.name == 'fixed' else rate}")
    for at, label in enumerate(labels):
        others = fit(rows[:at] + rows[at + 1 :], seconds[:at] + seconds[at + 1 :])
        print(
            f"{label}  measured {seconds[at]:6.2f} s  fitted {time_of(rows[at], costs):6.2f} s  "
            f"foretold by the others {time_of(rows[at], others):6.2f} s"
        )


def fit(rows: Sequence[Sequence[float]], seconds: Sequence[float]) -> list[float]:
    """Return seconds for a unit of each kind of work, none below 0: their relative errors least."""
    from scipy.optimize import nnls

    largest = [max(column) or 1.0 for column in zip(*rows, strict=True)]
    scaled = [
        [a / b / taken for a, b in zip(row, largest, strict=True)]
        for row, taken in zip(rows, seconds, strict=True)
    ]
    weights, _ = nnls(scaled, [1.0] * len(seconds))
    return [weight / size for weight, size in zip(weights, largest, strict=True)]


def time_of(row: Sequence[float], costs: Sequence[float]) -> float:
    """Return the seconds of a run's work."""
    return sum(a * c for a, c in zip(row, costs, strict=True))


def experts(given: argparse.Namespace) -> None:
    """Print what each rank held and read, by how many share the experts."""
    config = {**SMALL, "num_experts": 32}
    shape = Shape.of(config)
    layer = 2 * shape.experts * shape.expert
    print(f"experts: {layer / 1e6:.1f} MB a layer, {layer * shape.sparse_layers / 1e6:.1f} MB")
    print("ep  weights in memory at most, by rank (MB)  read, by rank (MB)")
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        source = make_checkpoint(Path(folder) / "source", config)
        for ep in (1, 2, 4):
            ranks = run_here(source, Path(folder) / "out", 4, 4, ep)["ranks"]
            held = "  ".join(f"{rank['peak_weight_bytes'] / 1e6:6.1f}" for rank in ranks)
            read = "  ".join(f"{rank['bytes_read'] / 1e6:6.1f}" for rank in ranks)
            print(f"{ep:2d}  {held:39s}  {read}", flush=True)


def predict(given: argparse.Namespace) -> None:
    """Print the seconds of each part for the large models."""
    rates = [
        given.fixed,
        given.read,
        given.products,
        given.quantized,
        given.exchanged,
        given.written,
    ]
    names = [field.name for field in fields(Work)]
    print(f"{'model':12s} GPUs  {'  '.join(f'{name:>9s}' for name in names)}      total")
    for model, config in (("DeepSeek-V3", DEEPSEEK_V3), ("Kimi-K2", KIMI_K2)):
        for ranks in (1, 8, 64):
            work = Shape.of(config).work(ranks, given.tokens, 1.0, 0.5625, one_disk=False)
            parts = work.seconds(rates)
            row = "  ".join(f"{part:8.0f}s" for part in parts)
            print(f"{model:12s} {ranks:4d}  {row}  {sum(parts):8.0f}s")


def main() -> None:
    """Measure, or predict."""
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(required=True)
    here = commands.add_parser("measure")
    here.set_defaults(run=measure)
    here.add_argument("--folder", default=None)
    here.add_argument("--experts", type=int, nargs="+", default=[8, 32])
    here.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    here.add_argument("--batches", type=int, nargs="+", default=[4, 16])
    here.add_argument("--rounds", type=int, default=1)
    shares = commands.add_parser("experts")
    shares.set_defaults(run=experts)
    shares.add_argument("--folder", default=None)
    far = commands.add_parser("predict")
    far.set_defaults(run=predict)
    far.add_argument("--tokens", type=int, default=512 * 512)
    far.add_argument("--fixed", type=float, default=60.0, help="seconds before the first unit")
    far.add_argument("--read", type=float, default=5e9, help="bytes a second of a node's disk")
    far.add_argument("--products", type=float, default=2e14, help="operations a second of a GPU")
    far.add_argument("--quantized", type=float, default=5e9, help="weights a second of a GPU")
    far.add_argument("--exchanged", type=float, default=4e10, help="bytes a second of a GPU's link")
    far.add_argument(
        "--written", type=float, default=2e9, help="bytes a second of the export's disk"
    )
    given = parser.parse_args()
    begun = time.perf_counter()
    given.run(given)
    print(f"({time.perf_counter() - begun:.0f} s)")


if __name__ == "__main__":
    main()
