"""Check many specs, each in a process of its own.

Small models of a type, and above all the module of transformers that they are built from, take tens
of megabytes that Python does not give back. A process that was forked for one spec takes them along
as it ends; what all share is imported once, before.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

import torch

from modelopt_lite.doctor.check import check_spec, failed_check
from modelopt_lite.doctor.findings import Checked
from modelopt_lite.models.specs import ModelSpec

Report = Callable[[Checked, int, int], None]


@dataclass(frozen=True, slots=True)
class _Running:
    position: int
    process: BaseProcess
    start: float


def check_specs(
    specs: Sequence[ModelSpec], *, jobs: int = 1, report: Report | None = None
) -> list[Checked]:
    """Check several specs; the results are in their order.

    Args:
        specs: What to check.
        jobs: How many processes at once; each takes one thread and less than 1 GB.
        report: Called as each is done, with how many are and how many there are.
    """
    import transformers.modeling_utils  # noqa: F401 -- once here, and not in each process

    waiting = list(enumerate(specs))[::-1]
    running: dict[Connection, _Running] = {}
    found: dict[int, Checked] = {}
    try:
        while waiting or running:
            while waiting and len(running) < max(1, jobs):
                position, spec = waiting.pop()
                receiver, process = _start(spec)
                running[receiver] = _Running(position, process, time.perf_counter())
            for ready in wait(list(running)):
                assert isinstance(ready, Connection)
                one = running.pop(ready)
                found[one.position] = _result(ready, one, specs[one.position])
                if report is not None:
                    report(found[one.position], len(found), len(specs))
    finally:
        for one in running.values():
            one.process.terminate()
    return [found[position] for position in range(len(specs))]


def _start(spec: ModelSpec) -> tuple[Connection, BaseProcess]:
    # Only a fork has what was imported and registered here.
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_check, args=(spec, sender), daemon=True)
    process.start()
    sender.close()  # the child's copy alone is left: its end is the end of the pipe
    return receiver, process


def _check(spec: ModelSpec, sender: Connection) -> None:
    torch.set_num_threads(1)  # threads of the parent are not in a fork: waiting for them never ends
    sender.send(check_spec(spec))


def _result(receiver: Connection, one: _Running, spec: ModelSpec) -> Checked:
    """Receive what a process found, or say how it ended without a word."""
    try:
        checked: Checked = receiver.recv()
    except EOFError:
        one.process.join()
        how = f"its process ended with status {one.process.exitcode}"
        checked = failed_check(spec, how, time.perf_counter() - one.start)
    finally:
        receiver.close()
    one.process.join()
    return checked
