"""Export without calibration: units are read, quantized and written, several at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from modelopt_lite.checkpoint.behind import WriteBehind
from modelopt_lite.export.exporter import Exporter
from modelopt_lite.export.quantize import check_finite
from modelopt_lite.job import Job
from modelopt_lite.offload.store import Rooms
from modelopt_lite.offload.units import Unit
from modelopt_lite.process import compute_on, threads_beside
from modelopt_lite.progress import Progress
from modelopt_lite.resume import UnitLog
from modelopt_lite.tensor_units import UNIT_BYTES

_MOST_QUANTIZERS = 8  # each holds a unit; disks are slower than that
_ALIGN = 64  # bytes; a cache line, and enough for every dtype
_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


def run_data_free(
    job: Job,
    exporter: Exporter,
    sink: WriteBehind,
    log: UnitLog,
    *,
    workers: int,
    progress: Progress,
) -> None:
    """Export every unit that no earlier run finished; of several ranks, each exports every so many.

    The bytes do not depend on who exports a unit: no value is made of several.

    Args:
        job: What to do; its plan needs no calibration.
        exporter: Takes each unit as it is read.
        sink: Where the exporter writes to.
        log: Knows which units are finished; ranks note one each at a time.
        workers: Threads that quantize; one more reads, and the sink's writes.
        progress: Told how far the run is.
    """
    units = job.plan.units
    loader = _Loader(job)

    def export(loaded: _Loaded) -> tuple[_Loaded, list[str]]:
        with torch.inference_mode():
            amax = check_finite(loaded.sources)
            return loaded, exporter.export(loaded.unit, loaded.sources, amax)

    left = [unit for unit in job.own_units if not log.is_finished(unit)]
    ranks = job.degrees.world_size if job.degrees is not None else 1
    finished = [log.is_finished(unit) for unit in units]
    # As many as the rank that has most of them: the others take part in noting those.
    rounds = max(finished[rank::ranks].count(False) for rank in range(ranks))
    before = finished.count(True)
    with (
        ThreadPoolExecutor(1, "reader") as reader,
        ThreadPoolExecutor(workers, "quantizer", compute_on, (1,)) as quantizers,
    ):
        ready = _ahead(reader, loader.load, left, 1)
        exported = _ahead(quantizers, export, ready, workers)
        for done in range(rounds):
            found = next(exported, None)
            log.settle()
            if found is None:
                log.idle()
                continue
            loaded, written = found
            log.finish(loaded.unit, written, exporter, sink)
            sink.then(partial(loader.release, loaded))
            so_far = min(before + ranks * (done + 1), len(units))
            progress(f"unit {loaded.unit.name}", so_far, len(units))
        log.settle()


@dataclass(slots=True)
class _Loaded:
    """A unit in memory: its tensors by name on disk, views of ``room`` on a processor."""

    unit: Unit
    room: Tensor
    sources: dict[str, Tensor]


class _Loader:
    """Reads units into memory that is used again, so that it need not be mapped again."""

    def __init__(self, job: Job) -> None:
        self._source = job.source
        self._device = job.device
        self._rooms = Rooms(torch.device("cpu"))

    def load(self, unit: Unit) -> _Loaded:
        infos = [self._source.tensors[name] for name in unit.entries]
        sizes = [-(-info.nbytes // _ALIGN) * _ALIGN for info in infos]
        room = self._rooms.take(max(UNIT_BYTES, sum(sizes)), pool="units")
        sources, start = {}, 0
        for info, size in zip(infos, sizes, strict=True):
            place = room[start : start + info.nbytes].view(info.dtype).view(info.shape)
            sources[info.name] = self._source.read(info.name, place).to(self._device)
            start += size
        return _Loaded(unit, room, sources)

    def release(self, loaded: _Loaded) -> None:
        loaded.sources.clear()
        self._rooms.give_back(loaded.room, pool="units")


def quantizer_count(device: torch.device) -> int:
    """Return how many threads quantize at a time: the one place that decides.

    Each computes on one thread, as what it does at a time is too little to share. Reading, writing
    and the interpreter take the rest of the processor. An accelerator serves one at a time anyway.
    """
    return 1 if device.type != "cpu" else min(threads_beside(), _MOST_QUANTIZERS)


def _ahead(
    pool: ThreadPoolExecutor,
    work: Callable[[_Item], _Result],
    items: Iterable[_Item],
    count: int,
) -> Iterator[_Result]:
    """Yield the results in order, while a pool works on as many as ``count`` that follow."""
    waiting: deque[Future[_Result]] = deque()
    try:
        for item in items:
            waiting.append(pool.submit(work, item))
            if len(waiting) > count:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        for future in waiting:
            future.cancel()
