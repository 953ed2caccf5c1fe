"""Check many specs, each in a process of its own.

Small models of a type, and above all the module of transformers that they are built from, take tens
of megabytes that Python does not give back. A process that was forked for one spec takes them along
as it ends; what all share is imported once, before.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch

from modelopt_lite.doctor.check import check_spec, failed_check
from modelopt_lite.doctor.findings import Checked
from modelopt_lite.models.specs import ModelSpec

Report = Callable[[Checked, int, int], None]


@dataclass(frozen=True, slots=True)
class Died:
    """What a process gave that ended without a result.

    Attributes:
        status: Its exit status; a negative one is the signal that ended it.
    """

    status: int | None


def check_specs(
    specs: Sequence[ModelSpec], *, jobs: int = 1, report: Report | None = None
) -> list[Checked]:
    """Check several specs; the results are in their order.

    Args:
        specs: What to check.
        jobs: How many processes at once; each takes one thread and less than 1 GB.
        report: Called as each is done, with how many are and how many there are.
    """
    found: dict[int, Checked] = {}
    for position, result in in_processes(check_spec, specs, jobs=jobs):
        if isinstance(result, Died):
            how = f"its process ended with status {result.status}"
            found[position] = failed_check(specs[position], how)
        else:
            found[position] = result
        if report is not None:
            report(found[position], len(found), len(specs))
    return [found[position] for position in range(len(specs))]


def in_processes(
    work: Callable[[Any], Any], items: Sequence[Any], *, jobs: int = 1
) -> Iterator[tuple[int, Any]]:
    """Yield (position, result) of each item as it is done, `Died` where its process was.

    Args:
        work: What to do with an item. Its result must be picklable; an exception ends the process.
        items: Each is given to ``work`` in a fork of this process, with one thread.
        jobs: How many processes at once.
    """
    import transformers.modeling_utils  # noqa: F401 -- once here, and not in each process

    waiting = list(enumerate(items))[::-1]
    running: dict[Connection, tuple[int, BaseProcess]] = {}
    try:
        while waiting or running:
            while waiting and len(running) < max(1, jobs):
                position, item = waiting.pop()
                receiver, process = _start(work, item)
                running[receiver] = position, process
            for ready in wait(list(running)):
                assert isinstance(ready, Connection)
                position, process = running.pop(ready)
                yield position, _result(ready, process)
    finally:
        for _, process in running.values():
            process.terminate()


def _start(work: Callable[[Any], Any], item: Any) -> tuple[Connection, BaseProcess]:
    # Only a fork has what was imported and registered here.
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_run, args=(work, item, sender), daemon=True)
    process.start()
    sender.close()  # the child's copy alone is left: its end is the end of the pipe
    return receiver, process


def _run(work: Callable[[Any], Any], item: Any, sender: Connection) -> None:
    torch.set_num_threads(1)  # threads of the parent are not in a fork: waiting for them never ends
    sender.send(work(item))


def _result(receiver: Connection, process: BaseProcess) -> Any:
    try:
        return receiver.recv()
    except EOFError:
        process.join()
        return Died(process.exitcode)
    finally:
        receiver.close()
        process.join()
