"""Run the command line in a process of its own that a signal meets at a call of one function."""

from __future__ import annotations

import os
import pkgutil
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from ranks import CONTEXT


@dataclass(frozen=True)
class Moment:
    """When a signal comes.

    Attributes:
        of: ``module:function``, or ``module:Class.method``.
        call: Before which call of it, from 1.
    """

    of: str
    call: int = 1

    def __str__(self) -> str:
        return f"{self.of.partition(':')[2]}-{self.call}"


def command(
    arguments: Sequence[str | Path], told: Path, at: Moment | None = None, sent: int = 0
) -> tuple[int, str]:
    """Run a command to its end, or until a signal ends it.

    Args:
        arguments: Of ``modelopt-lite``.
        told: A file for what it prints.
        at: When a signal comes; None for none.
        sent: The signal.

    Returns:
        Its exit status, below 0 where the signal killed it, and what it printed.
    """
    process = CONTEXT.Process(target=_run, args=([*map(str, arguments)], told, at, sent))
    process.start()
    process.join()
    assert process.exitcode is not None
    return process.exitcode, told.read_text(encoding="utf-8")


def _run(arguments: list[str], told: Path, at: Moment | None, sent: int) -> None:
    from modelopt_lite import cli

    with told.open("w", encoding="utf-8") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored by jobs of the background
    if at is not None:
        _arm(at, sent)
    sys.argv = ["modelopt-lite", *arguments]
    cli.main()


def _arm(at: Moment, sent: int) -> None:
    module, _, path = at.of.partition(":")
    owner, _, name = path.rpartition(".")
    place: Any = pkgutil.resolve_name(f"{module}:{owner}")
    real, calls = getattr(place, name), 0

    def stopped(*given: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == at.call:
            os.kill(os.getpid(), sent)
        return real(*given, **named)

    setattr(place, name, stopped)
