"""Export without calibration: units are read, quantized and written, several at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

from modelopt_lite.checkpoint.behind import WriteBehind
from modelopt_lite.export.exporter import Exporter
from modelopt_lite.export.quantize import check_finite
from modelopt_lite.job import Job
from modelopt_lite.offload.units import Unit
from modelopt_lite.progress import Progress
from modelopt_lite.resume import UnitLog

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
    """Export every unit that no earlier run finished.

    The bytes do not depend on the number of workers: no value is made of several units.

    Args:
        job: What to do; its plan needs no calibration.
        exporter: Takes each unit as it is read.
        sink: Where the exporter writes to.
        log: Knows which units are finished.
        workers: Threads that quantize; one more reads, and the sink's writes.
        progress: Told how far the run is.
    """
    units = job.plan.units

    def read(unit: Unit) -> tuple[Unit, dict[str, Tensor]]:
        return unit, {name: job.source.read(name).to(job.device) for name in unit.entries}

    def export(loaded: tuple[Unit, dict[str, Tensor]]) -> tuple[Unit, list[str]]:
        unit, sources = loaded
        with torch.inference_mode():
            return unit, exporter.export(unit, sources, check_finite(sources))

    left = [unit for unit in units if not log.is_finished(unit)]
    with (
        ThreadPoolExecutor(1, "reader") as reader,
        ThreadPoolExecutor(workers, "quantizer") as quantizers,
    ):
        loaded = _ahead(reader, read, left, 1)
        for done, (unit, written) in enumerate(_ahead(quantizers, export, loaded, workers)):
            log.finish(unit, written, exporter, sink)
            progress(f"unit {unit.name}", len(units) - len(left) + done + 1, len(units))


def quantizer_count(device: torch.device) -> int:
    """Return how many threads quantize at a time: the one place that decides."""
    return int(__import__("os").environ.get("H7W", "1"))


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
