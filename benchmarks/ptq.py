"""Wall, CPU and peak memory of a whole run, side by side with what else does the job.

    python benchmarks/ptq.py --peer-python modelopt=vmo/bin/python \
                             --peer-python llmcompressor=vlc/bin/python

Peers need environments of their own, which ``nox -s bench_ptq`` makes; by hand, torch first:

    python -m venv vmo && vmo/bin/pip install torch==2.13.0
    vmo/bin/pip install transformers==5.14.1 accelerate requests nvidia-modelopt==0.47.0
    python -m venv vlc && vlc/bin/pip install torch==2.13.0
    vlc/bin/pip install llmcompressor==0.14.0          # brings transformers 5.15 to 5.17

Two seeded checkpoints are made, a mixture of experts of 1.39 GB and a dense model of 1.14 GB. Every
side is a process of its own; the sides of a row take turns within each round, so that a machine
that drifts drifts for all. All have the same threads, the same 16 samples of 256 tokens in batches
of 4, and files that are in the page cache. ``ptq_sides.py`` says what each side runs. A side whose
environment is not given is left out, and so is a format that this version does not have.

Printed are medians over the rounds: wall and CPU seconds and the peak of resident memory, what the
kernel accounts to the process and its children; then ours over each peer's, with the target.
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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
CALIBRATED = ("fp8", "nvfp4")
WEIGHT_ONLY = ("fp8_2d_blockwise_weight_only", "w4a16_nvfp4")
MODELS: dict[str, tuple[str, dict[str, int]]] = {
    "qwen3_moe": (
        "QWEN3_MOE",
        {
            "hidden_size": 1024,
            "num_hidden_layers": 10,
            "num_experts": 48,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 384,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "vocab_size": 32768,
        },
    ),
    "llama": (
        "LLAMA",
        {
            "hidden_size": 1536,
            "num_hidden_layers": 12,
            "intermediate_size": 7168,
            "num_attention_heads": 12,
            "num_key_value_heads": 4,
            "vocab_size": 32000,
        },
    ),
}
# Side -> the environment it runs in; "" is this one.
SIDES = {
    "ours": "",
    "modelopt": "modelopt",
    "oneshot": "llmcompressor",
    "oneshot_routed": "llmcompressor",
    "model_free": "llmcompressor",
    "floor": "",
}
MAKE = """
import json, sys, pathlib, synthetic
name, changes, folder = sys.argv[1:]
synthetic.make_checkpoint(pathlib.Path(folder), getattr(synthetic, name), **json.loads(changes))
"""


@dataclass(frozen=True, slots=True)
class Sample:
    """One run of one side."""

    wall: float
    cpu: float
    rss: float
    """GiB."""
    phases: dict[str, list[float]]


@dataclass(slots=True)
class Row:
    """One model in one format, and the samples of each side."""

    model: str
    fmt: str
    samples: dict[str, list[Sample]] = field(default_factory=dict)

    def median(self, side: str, what: str) -> float:
        """Return the median of "wall", "cpu" or "rss"."""
        return statistics.median(getattr(sample, what) for sample in self.samples[side])


def target(row: Row, side: str, what: str) -> float | None:
    """Return what ours may be, as a multiple of a side's; None where nothing is set."""
    if side == "modelopt":
        wall = {"fp8": 0.75, "nvfp4": 0.4}[row.fmt]
        rss = {"qwen3_moe": 0.35, "llama": 0.4}[row.model]
        return {"wall": wall, "cpu": None, "rss": rss}[what]
    return {
        "oneshot": {"wall": 0.3, "rss": 0.4},
        "model_free": {"wall": 0.35, "rss": 0.8},
        "floor": {"wall": 1.4},
    }.get(side, {}).get(what)


class Bench:
    """Runs sides as processes, in a folder that holds the checkpoints."""

    def __init__(self, folder: Path, pythons: dict[str, str], threads: int) -> None:
        self._folder = folder
        self._pythons = pythons
        threading = {f"{name}_NUM_THREADS": str(threads) for name in ("OMP", "MKL", "RAYON")}
        self._environment = {
            **{k: v for k, v in os.environ.items() if not k.startswith("PYTHON")},
            **threading,
            "OMP_WAIT_POLICY": "PASSIVE",
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }

    def checkpoint(self, model: str) -> Path:
        """Make a model's checkpoint, if it is not there, in a process of its own."""
        folder = self._folder / model
        if not (folder / "config.json").exists():
            name, changes = MODELS[model]
            command = [sys.executable, "-c", MAKE, name, json.dumps(changes), str(folder)]
            subprocess.run(command, check=True, cwd=HERE, env=self._own_environment())
        return folder

    def run(self, side: str, source: Path, fmt: str) -> Sample:
        """Run one side once; what it wrote is deleted, but for ours, which the floor writes."""
        out = self._folder / (fmt if side == "ours" else "out")
        subprocess.run(["rm", "-rf", str(out)], check=True)
        python = self._pythons[SIDES[side]]
        command = [python, str(HERE / "ptq_sides.py"), side, str(source), str(out), fmt]
        own = not SIDES[side]
        started = time.perf_counter()
        with (
            tempfile.TemporaryFile() as printed,
            tempfile.TemporaryFile() as log,
            subprocess.Popen(
                command,
                stdout=printed,
                stderr=log,
                env=self._own_environment() if own else self._environment,
            ) as process,
        ):
            _, status, usage = os.wait4(process.pid, 0)
            wall = time.perf_counter() - started
            process.returncode = os.waitstatus_to_exitcode(status)
            printed.seek(0)
            lines = printed.read().decode().splitlines()
            if process.returncode:
                log.seek(0)
                tail = "\n".join(log.read().decode(errors="replace").splitlines()[-15:])
                sys.exit(f"{side} {fmt} of {source.name} exited with {process.returncode}:\n{tail}")
        phases = json.loads(lines[-1])["phases"]
        cpu = usage.ru_utime + usage.ru_stime
        if side == "floor":
            wall, cpu = wall - phases["load"][0], cpu - phases["load"][1]
        if side != "ours":
            subprocess.run(["rm", "-rf", str(out)], check=True)
        return Sample(wall, cpu, usage.ru_maxrss / 2**20, phases)

    def _own_environment(self) -> dict[str, str]:
        paths = [str(HERE.parent), os.environ.get("PYTHONPATH", "")]
        return {**self._environment, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def has_recipe(name: str) -> bool:
    """Whether this version has a recipe."""
    return (HERE.parent / "modelopt_lite" / "recipes" / f"{name}.yaml").exists()


def sides_of(model: str, fmt: str, wanted: list[str], pythons: dict[str, str]) -> list[str]:
    """Return the sides of a row, ours first: the floor writes as many bytes as ours wrote."""
    fits = {"ours", "model_free"} if fmt in WEIGHT_ONLY else set(SIDES) - {"model_free"}
    if model != "qwen3_moe":
        fits.discard("oneshot_routed")  # nothing is routed
    return [s for s in SIDES if s in fits and s in wanted and SIDES[s] in pythons]


def show(row: Row) -> None:
    """Print a row's medians, and ours over each other side's."""
    rounds = max(len(samples) for samples in row.samples.values())
    print(f"\n{row.model} {row.fmt}, {rounds} rounds")
    for side in row.samples:
        wall, cpu, rss = (row.median(side, what) for what in ("wall", "cpu", "rss"))
        line = f"  {side:15}{wall:8.1f} s wall {cpu:8.1f} s CPU {rss:7.2f} GiB"
        if side != "ours" and "ours" in row.samples:
            parts = [ratio(row, side, what) for what in ("wall", "cpu", "rss")]
            line += "   ours: " + ", ".join(parts)
        print(line)
        names = row.samples[side][0].phases
        times = {
            n: statistics.median(s.phases.get(n, [0.0])[0] for s in row.samples[side])
            for n in names
        }
        print(" " * 17 + ", ".join(f"{n} {seconds:.1f}" for n, seconds in times.items()))


def ratio(row: Row, side: str, what: str) -> str:
    """Return ours over a side's as text, and whether that meets the target."""
    value = row.median("ours", what) / row.median(side, what)
    limit = target(row, side, what)
    verdict = "" if limit is None else f" ({'meets' if value <= limit else 'misses'} {limit:g})"
    return f"{what} {value:.2f} x{verdict}"


def as_json(rows: list[Row], options: argparse.Namespace) -> str:
    """Return every sample and median as JSON."""
    found: list[dict[str, Any]] = []
    for row in rows:
        for side, samples in row.samples.items():
            found.append(
                {
                    "model": row.model,
                    "format": row.fmt,
                    "side": side,
                    **{what: row.median(side, what) for what in ("wall", "cpu", "rss")},
                    "samples": [[s.wall, s.cpu, s.rss] for s in samples],
                    "phases": [s.phases for s in samples],
                }
            )
    return json.dumps({"threads": options.threads, "rows": found}, indent=1)


def parse() -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    formats = [*CALIBRATED, *WEIGHT_ONLY]
    parser.add_argument("--formats", nargs="+", choices=formats, default=formats)
    parser.add_argument("--peer-python", action="append", default=[], metavar="PEER=PYTHON")
    parser.add_argument("--folder", type=Path, help="keeps the checkpoints for the next call")
    parser.add_argument("--json", type=Path, help="write every sample there")
    return parser.parse_args()


def main() -> None:
    """Run all rows."""
    options = parse()
    pythons = {"": sys.executable, **dict(peer.split("=", 1) for peer in options.peer_python)}
    if unknown := pythons.keys() - set(SIDES.values()):
        sys.exit(f"--peer-python knows modelopt and llmcompressor, got {', '.join(unknown)}")
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        bench = Bench(folder, pythons, options.threads)
        print(f"{options.threads} threads, load before: {os.getloadavg()[0]:.1f}", flush=True)
        for model in options.models:
            source = bench.checkpoint(model)
            for fmt in filter(has_recipe, options.formats):
                row = Row(model, fmt)
                sides = sides_of(model, fmt, options.sides, pythons)
                for _ in range(options.rounds):
                    for side in sides:
                        row.samples.setdefault(side, []).append(bench.run(side, source, fmt))
                rows.append(row)
                show(row)
                sys.stdout.flush()
                if options.json:
                    options.json.write_text(as_json(rows, options))


if __name__ == "__main__":
    main()
