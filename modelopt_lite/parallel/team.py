"""The processes of one run, and how they talk: two collectives, from which all else is made.

A rank never blocks in a collective: it looks, while it waits, whether another rank has failed, and
then ends with that rank's error. So a run ends within seconds wherever it is.
"""

from __future__ import annotations

import atexit
import os
import pickle
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from modelopt_lite.errors import InternalError
from modelopt_lite.parallel.failure import Failures, meet

_FOREVER = timedelta(days=7)  # a rank may search for hours; failures are seen otherwise
_LONGEST_PAUSE = 0.002  # seconds between two looks
_LEAVING = 3.0  # seconds
Result = TypeVar("Result")


class Team:
    """All ranks of a run; every method is called by every rank, in the same order.

    Args:
        rank: This process.
        world_size: How many there are.
        device: Where tensors of rows lie.
        failures: Tells of ranks that failed.
    """

    def __init__(
        self, rank: int, world_size: int, device: torch.device, failures: Failures
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self.device = device
        self._failures = failures

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which writes what belongs to no expert."""
        return self.rank == 0

    def exchange(self, what: str, parts: Sequence[Tensor]) -> list[Tensor]:
        """Send one part to each rank, and return the part from each.

        Args:
            what: Names the step; where ranks are at different ones they have lost each other.
            parts: By rank, uint8 [n], on one device; the sizes are free.

        Raises:
            RankError: Another rank failed.
            InternalError: Another rank is at another step.
        """
        device = parts[0].device
        tag = zlib.crc32(what.encode())
        head = torch.tensor([[tag, part.numel()] for part in parts], device=device)
        heads = torch.empty_like(head)
        self._wait(dist.all_to_all_single(heads, head, async_op=True))
        table = heads.tolist()
        for rank, (other, _) in enumerate(table):
            if other != tag:
                raise InternalError(f"rank {self.rank} is at {what!r}, and rank {rank} is not")
        sizes = [size for _, size in table]
        out = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
        sent = [part.numel() for part in parts]
        work = dist.all_to_all_single(out, torch.cat(list(parts)), sizes, sent, async_op=True)
        self._wait(work)
        return list(out.split(sizes))

    def everyone(self, what: str, value: Any) -> list[Any]:
        """Return what each rank gives, by rank."""
        packed = _packed(value)
        return [_unpacked(part) for part in self.exchange(what, [packed] * self.world_size)]

    def send(self, what: str, values: Sequence[Any]) -> list[Any]:
        """Send a value to each rank; return the value from each."""
        return [_unpacked(part) for part in self.exchange(what, list(map(_packed, values)))]

    def collect(self, what: str, value: Any) -> list[Any]:
        """Return what each rank gives, on rank 0; nothing on the others."""
        nothing = torch.empty(0, dtype=torch.uint8)
        parts = [_packed(value), *[nothing] * (self.world_size - 1)]
        found = self.exchange(what, parts)
        return [_unpacked(part) for part in found] if self.is_first else []

    def decide(self, what: str, make: Callable[[], Result]) -> Result:
        """Return what rank 0 makes, on every rank."""
        packed = _packed(make() if self.is_first else None)
        result: Result = _unpacked(
            self.exchange(what, [packed if self.is_first else packed[:0]] * self.world_size)[0]
        )
        return result

    def barrier(self, what: str) -> None:
        """Wait until every rank is here."""
        self.everyone(what, None)

    def largest(self, values: Tensor) -> Tensor:
        """Return the largest of each value over all ranks; none may be NaN."""
        result = values.clone()
        self._wait(dist.all_reduce(result, dist.ReduceOp.MAX, async_op=True))
        return result

    def total(self, values: Tensor) -> Tensor:
        """Return the sum of each whole number over all ranks."""
        result = values.clone()
        self._wait(dist.all_reduce(result, dist.ReduceOp.SUM, async_op=True))
        return result

    def _wait(self, work: Any) -> None:
        pause = 1e-5
        while not work.is_completed():
            self._failures.check()
            time.sleep(pause)
            pause = min(1.5 * pause, _LONGEST_PAUSE)
        try:
            work.wait()
        except RuntimeError as error:
            raise self._failures.lost(error) from error


def asked_for() -> int:
    """Return how many processes a launcher such as torchrun says that this run has."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size()
    size = os.environ.get("WORLD_SIZE", "")
    return int(size) if size.isdecimal() and "RANK" in os.environ else 1


def is_first_process() -> bool:
    """Whether this is rank 0, or the only process."""
    return asked_for() == 1 or os.environ.get("RANK") == "0"


@contextmanager
def team_of_run() -> Iterator[Team | None]:
    """Join the other processes of this run, if a launcher started several; None for a single one.

    An error that leaves the block is told to the others, who then end, too.

    Raises:
        RankError: Another rank failed, or never started.
    """
    if asked_for() == 1:
        yield None
        return
    device = _own_device()
    started = not dist.is_initialized()
    store, rank, world_size = meet(dist)
    if started:
        backend = "gloo" if device.type == "cpu" else f"cpu:gloo,{device.type}:{_backend(device)}"
        dist.init_process_group(
            backend,
            store=store,
            rank=rank,
            world_size=world_size,
            timeout=_FOREVER,
        )
    try:
        with Failures(store, rank, world_size) as failures:
            team = Team(rank, world_size, device, failures)
            yield team
            team.barrier("end")
    finally:
        if started:
            _leave()


def _leave() -> None:
    """Take the group down; where a rank hangs, its connections do too, and are left to the end."""
    thread = threading.Thread(target=dist.destroy_process_group, name="leave", daemon=True)
    thread.start()
    thread.join(_LEAVING)
    if thread.is_alive():
        atexit.register(_exit_at_once)


def _exit_at_once() -> None:
    """End the process without waiting for connections to a rank that hangs."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


def _own_device() -> torch.device:
    """The accelerator that this process uses of those of its machine; else the CPU."""
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None:
        return torch.device("cpu")
    index = int(os.environ.get("LOCAL_RANK", "0")) % torch.accelerator.device_count()
    torch.accelerator.set_device_index(index)
    return torch.device(accelerator.type, index)


def _backend(device: torch.device) -> str:
    return str(dist.get_default_backend_for_device(device))


def _packed(value: Any) -> Tensor:
    return torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)


def _unpacked(part: Tensor) -> Any:
    return pickle.loads(part.numpy().tobytes())
