"""Start the ranks of a run on this machine, over gloo, from a process that has imported it all."""

from __future__ import annotations

import multiprocessing
import os
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

import modelopt_lite.api

CONTEXT = multiprocessing.get_context("forkserver")
_KINDS = ("deepseek_v3", "glm4v_moe", "gpt_oss", "llama", "mixtral", "qwen3_moe")
# These take seconds: once for all ranks. Modules of the tests are not found there in Python 3.11,
# and what a release lacks is left out.
CONTEXT.set_forkserver_preload(
    [
        *("transformers.integrations.moe", "transformers.models.auto.modeling_auto"),
        *(f"transformers.models.{kind}.modeling_{kind}" for kind in _KINDS),
        "modelopt_lite.api",
    ]
)


@dataclass(slots=True)
class Ended:
    """How a rank ended: ``value`` is what it returned; else ``error`` has class and message."""

    value: Any = None
    error: str | None = None
    exitcode: int | None = None


def _rank(
    rank: int, size: int, port: int, end: Connection, work: Callable[..., Any], given: Sequence[Any]
) -> None:
    torch.set_num_threads(1)
    os.fsync = lambda fd: None  # no power fails meanwhile
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TRANSFORMERS_VERBOSITY": "error",
    }
    try:
        end.send(Ended(work(*given)))
    except BaseException as error:
        end.send(Ended(error=f"{type(error).__name__}: {error}"))


def start(
    size: int, work: Callable[..., Any], *given: Any, missing: Sequence[int] = ()
) -> list[tuple[Any, Connection]]:
    """Start ranks that do ``work(*given)``; those ``missing`` never start."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    started = []
    for rank in range(size):
        if rank not in missing:
            here, there = CONTEXT.Pipe()
            process = CONTEXT.Process(target=_rank, args=(rank, size, port, there, work, given))
            process.start()
            there.close()
            started.append((process, here))
    return started


def wait(started: Sequence[tuple[Any, Connection]], seconds: float = 120) -> list[Ended]:
    """Wait for ranks, and return how each ended; those that hang are killed."""
    deadline = time.monotonic() + seconds
    ends = []
    for process, here in started:
        ended = Ended(error="hangs")
        try:
            if here.poll(max(deadline - time.monotonic(), 0)):
                ended = here.recv()
        except EOFError:
            ended = Ended(error="died")
        process.join(max(deadline - time.monotonic(), 0.1))
        if process.is_alive():
            process.kill()
            process.join()
        ended.exitcode = process.exitcode
        ends.append(ended)
    return ends


def quantize(source: Path, out: Path, batches: list[torch.Tensor], options: dict[str, Any]) -> Any:
    """Quantize on this rank."""
    return modelopt_lite.api.quantize_and_export(
        source, export_dir=out, calib_data=batches, **{"progress": False, **options}
    )


def run_ranks(
    size: int, source: Path, out: Path, batches: list[torch.Tensor], **options: Any
) -> list[Any]:
    """Quantize on several ranks, and return the report of each."""
    ends = wait(start(size, quantize, source, out, batches, options))
    assert not any(ended.error for ended in ends), [ended.error for ended in ends]
    return [ended.value for ended in ends]
