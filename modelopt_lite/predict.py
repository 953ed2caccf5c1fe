"""Foretell what a run takes: the peak of memory by tier, bytes read and written, and time.

A run's memory is the process as it is when it starts, and what it adds: units of weights, what is
waiting to be written, and the activations of its batches. All but the process and the compiled
kernels follow from shapes; ``benchmarks/memory_prediction.py`` holds the sum against measured runs.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from modelopt_lite.calibrate.data import CalibrationData
from modelopt_lite.checkpoint.behind import QUEUE_LIMIT
from modelopt_lite.checkpoint.dequant import DequantizedSource
from modelopt_lite.checkpoint.shards import ExportLayout
from modelopt_lite.export.configs import config_texts
from modelopt_lite.formats.base import chunk_rows
from modelopt_lite.job import Job
from modelopt_lite.offload.memory import MOST_KEPT
from modelopt_lite.offload.store import WeightStore
from modelopt_lite.offload.stream import expected_order
from modelopt_lite.offload.units import Unit, output_head
from modelopt_lite.process import collector_paused
from modelopt_lite.rereads import expert_reads
from modelopt_lite.searching import Seen, search_memory
from modelopt_lite.sharding import stacked_layers
from modelopt_lite.tensor_units import READ_AHEAD

BANDWIDTH = 10**9
"""Bytes a second of a disk, where none is given."""

Batch = tuple[int, int]
"""Sequences of a batch, and their length in tokens."""

# Measured, docs/performance.md. Compiled kernels: a few for whole matrices; one for each number of
# rows that experts see, up to the bound on their cache.
_DENSE_KERNELS = 10 << 20
_EXPERT_KERNEL, _MOST_KERNELS = 720 << 10, 64
_PIECE_BYTES = 12 * 4  # of an element of a matrix's chunk: a dozen float32 pieces at a time
_PER_MATRIX, _PER_OUTPUT = 2000, 50  # bytes of notes in Python: evidence, errors; their places


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What a run takes, in bytes.

    Attributes:
        process: What of host memory the process itself is, and what passes through it -> bytes.
        work: What holds weights, activations and results, where the model runs -> bytes.
        on_host: The model runs on the CPU, so that ``work`` is host memory, too.
        disk_scratch: Temporary files.
        bytes_read: The source's tensors, each as often as it is read.
        expert_reads: How often an expert's tensor is read, at most;
        bytes_read_again: of ``bytes_read``, those beyond the first time.
        bytes_written: The export's files but its report and its card.
    """

    process: Mapping[str, int]
    work: Mapping[str, int]
    on_host: bool
    disk_scratch: int
    bytes_read: int
    bytes_written: int
    expert_reads: int = 1
    bytes_read_again: int = 0

    @property
    def work_peak(self) -> int:
        """The most memory at a time where the model runs; on a CPU without the process itself."""
        return sum(self.work.values())

    @property
    def host_peak(self) -> int:
        """The most resident memory of the process at a time."""
        return sum(self.process.values()) + self.work_peak * self.on_host

    @property
    def device_peak(self) -> int:
        """The most memory of an accelerator at a time; 0 where the model runs on the CPU."""
        return self.work_peak * (not self.on_host)

    def to_json(
        self, read_bandwidth: int = BANDWIDTH, write_bandwidth: int = BANDWIDTH
    ) -> dict[str, Any]:
        """Return JSON values: peaks by tier, what they are for, and the seconds of the disk.

        Args:
            read_bandwidth: Bytes a second,
            write_bandwidth: bytes a second. Computing is in neither time.
        """
        return {
            "host": self.host_peak,
            "device": self.device_peak,
            "disk_scratch": self.disk_scratch,
            "host_parts": {**self.process, **(self.work if self.on_host else {})},
            "device_parts": {} if self.on_host else dict(self.work),
            "bytes_read": self.bytes_read,
            "expert_reads": self.expert_reads,
            "bytes_read_again": self.bytes_read_again,
            "bytes_written": self.bytes_written,
            "read_bandwidth": read_bandwidth,
            "write_bandwidth": write_bandwidth,
            "seconds_reading": self.bytes_read / read_bandwidth,
            "seconds_writing": self.bytes_written / write_bandwidth,
        }


def planned_batches(size: int, seq_len: int, batch_size: int) -> list[Batch]:
    """Return the batches of ``size`` sequences of one length."""
    whole, rest = divmod(size, batch_size)
    return [(batch_size, seq_len)] * whole + [(rest, seq_len)] * bool(rest)


def batch_shapes(data: CalibrationData | None) -> list[Batch]:
    """Return the batches of calibration data; none where there are no data."""
    return [(len(batch), batch.shape[1]) for batch in data.batches] if data else []


@collector_paused()
def predict(
    job: Job,
    layout: ExportLayout,
    batches: Sequence[Batch],
    *,
    budget: int | None,
    waiting: int | None = None,
) -> Prediction:
    """Foretell a run from shapes alone.

    Args:
        job: The run; its process is taken to be this one, as it is now.
        layout: What it writes.
        batches: What it calibrates with, where it does.
        budget: Bytes of units in memory at a time; None: all of them.
        waiting: Bytes of waiting activations in memory; the others lie on disk. None: all.
    """
    batches = batches if job.plan.needs_calibration else ()
    on_host = job.device.type == "cpu"
    outputs = sum(len(part.tensors) for part in layout.parts.values())
    work = {
        "weights": weights_in_memory(job, job.store(), _streamed(job), budget)
        if batches
        else _weights_without_data(job),
        "quantizing": _PIECE_BYTES * chunk_rows(1, job.device),
        "results to be written": _queued(job),
    }
    on_disk = 0
    if on_host and not batches:
        work["freed and kept"] = MOST_KEPT // 2
    if batches and job.degrees is not None and job.rank == 0:
        work["stacks read in full"] = _whole_stacks(job)
    if batches:
        shapes = Shapes(job)
        runs = 1 + job.runs_twice
        activations = runs * [math.prod(batch) * shapes.waiting for batch in batches]
        kept = sum(activations)
        if waiting is not None:  # the pass that runs has its own in memory
            kept = min(kept, waiting + max(activations))
            on_disk = max(0, sum(activations) - waiting)
        work |= {
            "waiting activations": kept,
            "running activations": max(map(shapes.running, batches)),
            "compiled kernels": shapes.kernels,
        }
        if job.plan.recipe.algorithm.needs_inputs:
            tokens = sum(map(math.prod, batches))
            work |= search_memory(job, Seen(tokens, len(batches), shapes.share, shapes.itemsize))
    config, class_name = job.source.config, type(job.model).__name__
    times, again = expert_reads(job)
    texts = [t for p in job.plans.values() for t in config_texts(config, p, class_name).values()]
    return Prediction(
        process={
            "process": resident_bytes(),
            "notes on tensors": _PER_MATRIX * len(job.plan.matrices) + _PER_OUTPUT * outputs,
            "reading": staging(job),
        },
        work=work,
        on_host=on_host,
        disk_scratch=on_disk,
        bytes_read=_bytes_read(job) + again,
        expert_reads=times,
        bytes_read_again=again,
        bytes_written=layout.total_bytes
        + len(job.plans) * job.sidecar_bytes()
        + sum(len(text.encode()) for text in texts),
    )


def resident_bytes() -> int:
    """Return how much memory of this process is resident now; 0 where the system does not tell."""
    try:
        fields = Path("/proc/self/statm").read_text(encoding="ascii").split()
    except OSError:
        return 0
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE")


class Shapes:
    """What activations of a model take, from its config and the shapes of its matrices.

    Attributes:
        itemsize: Bytes of a value.
        used: The part of the routed experts that a token goes to.
        share: The part of all tokens that the most popular expert sees.
    """

    def __init__(self, job: Job) -> None:
        model = job.model
        config = model.config
        config = config.get_text_config() if hasattr(config, "get_text_config") else config
        embedding = model.get_input_embeddings().weight
        self.itemsize, self._hidden = int(embedding.dtype.itemsize), int(embedding.shape[1])
        self._experts = int(_first(config, "num_experts", "n_routed_experts", "num_local_experts"))
        chosen = int(_first(config, "num_experts_per_tok", "top_k_experts"))
        self._choices = chosen * self._experts
        self.used = chosen / max(self._experts, 1)
        # Routing is uneven: the most popular expert sees a few times its share.
        self.share = 1.0 if job.all_experts else min(1.0, 4 * chosen / max(self._experts, 1))
        self._eager_heads = 0
        if getattr(config, "_attn_implementation", None) == "eager":
            self._eager_heads = int(getattr(config, "num_attention_heads", 0))
        self._width = self._expert_width = 0
        for matrix in job.plan.matrices:
            rows = matrix.shape[2] if matrix.input_major and matrix.stacked else matrix.shape[-2]
            if matrix.experts is None:
                self._width = max(self._width, rows)
            else:
                self._expert_width = max(self._expert_width, rows)

    @property
    def hidden(self) -> int:
        """Bytes a token of what enters a layer."""
        return self._hidden * self.itemsize

    @property
    def waiting(self) -> int:
        """Bytes a token: what entered the first layer, and what enters the next one."""
        return 2 * self._hidden * self.itemsize

    def running(self, batch: Batch) -> int:
        """Bytes of a batch inside a layer, at the widest place.

        In a feed-forward part that is the residual, its norm, and three results as wide as its
        matrices; in a norm, which computes in float32, eight times the hidden size.
        """
        count, length = batch
        dense = max(2 * self._hidden + 3 * self._width, 8 * self._hidden)
        expert = int(self.share * (2 * self._hidden + 4 * self._expert_width))
        token = self.itemsize * (dense + expert * bool(self._experts)) + 8 * self._choices
        scores = self._eager_heads * count * length**2 * (self.itemsize + 4)
        return count * length * token + scores

    @property
    def kernels(self) -> int:
        """Bytes of compiled kernels."""
        kinds = min(2 * self._experts, _MOST_KERNELS)
        return _DENSE_KERNELS + _EXPERT_KERNEL * kinds


def _first(config: Any, *names: str) -> int:
    return next((v for n in names if (v := getattr(config, n, None)) is not None), 0)


def weights_in_memory(
    job: Job, store: WeightStore, units: Sequence[Unit], budget: int | None
) -> int:
    """Return the most bytes of units at a time, with values that the model holds in another form.

    Args:
        job: The run.
        store: What brings units in.
        units: Those that passes run through, in order.
        budget: Bytes of units at a time; None: all of them.
    """
    tensors = job.source.tensors
    sizes = [
        store.bytes_of(unit)
        + sum(_own_rows(unit, tensors[name].nbytes) for name in store.kept_apart(unit))
        for unit in units
    ]
    if budget is None:
        return sum(sizes)
    sized = list(zip(units, sizes, strict=True))
    whole = sum(size for unit, size in sized if job.stays(unit))
    by_name = {unit.name: size for unit, size in sized if not job.stays(unit)}
    moving = [unit for unit in units if not job.stays(unit)]
    # A part comes in while its layer is there.
    named = [by_name[u.name] + by_name.get(u.parent or "-", 0) for u in moving]
    # A unit comes in while the one before it may still be waited for by the writer.
    pairs = max((a + b for a, b in pairwise(named)), default=sum(named))
    return whole + max(pairs, _most_in_a_row([by_name[u.name] for u in moving], budget - whole))


def _own_rows(unit: Unit, size: int) -> int:
    """Of the bytes of a tensor that a unit is made of, those that it takes."""
    if not unit.of_stack or unit.experts is None:
        return size
    return size * len(unit.experts) // unit.count


def _whole_stacks(job: Job) -> int:
    """Bytes of the experts of a layer that rank 0 makes one tensor of, as it quantizes them."""
    tensors, sizes = job.source.tensors, dict[str, int]()
    layers = stacked_layers(job)
    for m in job.plan.matrices if layers else ():
        if m.unit in layers and m.stacked:
            sizes[m.unit] = sizes.get(m.unit, 0) + tensors[m.source].nbytes
    return max(sizes.values(), default=0)


def _most_in_a_row(sizes: Sequence[int], budget: int) -> int:
    """The largest sum of sizes in a row that is within the budget."""
    most = total = first = 0
    for size in sizes:
        total += size
        while total > max(budget, 0):
            total -= sizes[first]
            first += 1
        most = max(most, total)
    return most


def _streamed(job: Job) -> list[Unit]:
    """The units that passes run through; the head stays out where nothing depends on it."""
    head = output_head(job.model)
    quantized = {matrix.unit for matrix in job.plan.matrices}
    skipped = head[0] if head and head[0] not in quantized else None
    order = expected_order(job.model, job.own_units)
    return [unit for unit in order if unit.name != skipped]


def _weights_without_data(job: Job) -> int:
    """Without calibration: units that are read, wait, are quantized and are written."""
    sizes = job.unit_sizes()
    return sum(sorted(sizes)[-READ_AHEAD:])


def _queued(job: Job) -> int:
    """Bytes of results that wait to be written: those of a unit, up to the writer's limit.

    A tensor above the limit waits alone, and those of its matrix until it is made.
    """
    of_unit: dict[str, int] = {}
    largest = 0
    for m in job.plan.matrices:
        size = sum(math.prod(part.shape) * part.dtype.itemsize for part in m.parts)
        of_unit[m.unit] = of_unit.get(m.unit, 0) + size
        largest = max(largest, size)
    return max(largest, min(QUEUE_LIMIT, max(of_unit.values(), default=0)))


def staging(job: Job) -> int:
    """Return the bytes of a tensor on its way: what it is decoded from, or to where it goes on."""
    source = job.source
    decoded = 0
    if isinstance(source, DequantizedSource):
        for name in source.consumed:
            codes = sum(info.nbytes for info in source.stored(name))
            decoded = max(decoded, codes + 2 * source.tensors[name].nbytes)
    if job.device.type == "cpu":
        return decoded
    return decoded + max(info.nbytes for info in source.tensors.values())


def _bytes_read(job: Job) -> int:
    """Each stored tensor once; scales of the source's own inputs and cache stay unread."""
    source, size = job.source, job.source.total_bytes
    unread: dict[str, int] = {}
    if isinstance(source, DequantizedSource):
        unread = {name: source.base.tensors[name].nbytes for name in source.dropped}
    of_passes = job.rank > 0 and not job.plan.by_tensor  # rank 0 reads what no pass brings in
    own = _streamed(job) if of_passes else job.own_units
    known = {unit.name for unit in own}
    foreign = [unit for unit in job.plan.units if unit.name not in known]
    names = [name for unit in foreign for name in unit.entries] if job.plan.by_tensor else []
    if not job.plan.by_tensor and (foreign or of_passes):
        store = job.store()
        whole = stacked_layers(job) if job.rank == 0 else ()  # which it makes the export of
        for unit in (u for u in foreign if u.of_stack and u.parent not in whole):
            names = [name for name in store.sources_of(unit) if source.by_rows(name)]
            stored = (info for name in names for info in source.stored(name))
            size -= sum(_own_rows(unit, info.nbytes) for info in stored)
        names = [n for unit in foreign if not unit.of_stack for n in store.sources_of(unit)]
    if of_passes:
        seen = {name for unit in own for name in store.sources_of(unit)}
        names = [name for name in (*names, *job.plan.names.unmapped) if name not in seen]
    unread |= {info.name: info.nbytes for name in names for info in source.stored(name)}
    return size - sum(unread.values())
