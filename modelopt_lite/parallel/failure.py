"""Find out that another rank failed, died, or never started, and which, and why.

Ranks share a key-value store (torchrun's, or that of rank 0). Each writes there, once a second,
that it is alive; the first that fails writes its error, and waits until the others have ended.
"""

from __future__ import annotations

import json
import os
import threading
import time
from contextlib import suppress
from datetime import timedelta
from types import TracebackType
from typing import Any

from modelopt_lite.errors import ModelOptLiteError, RankError
from modelopt_lite.words import counted

START_VARIABLE = "MODELOPT_LITE_START_SECONDS"
START_SECONDS = 30.0
SILENCE = 20.0
"""Seconds without a sign of life, after which a rank counts as dead."""

_BEAT = 1.0
# Seconds that the first to fail waits until the others have ended and cleaned up: a launcher ends
# them as soon as one has.
_CLEANING = 15.0
_runs = 0  # of this process: each has keys of its own


def meet(dist: Any) -> tuple[Any, int, int]:
    """Connect to the store of all ranks and wait until each has; return it, the rank, the number.

    Args:
        dist: ``torch.distributed``.

    Raises:
        RankError: Some never came; it names them.
    """
    if dist.is_initialized():
        store = dist.distributed_c10d._get_default_store()
        return store, dist.get_rank(), dist.get_world_size()
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    seconds = float(os.environ.get(START_VARIABLE, START_SECONDS))
    of_launcher = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    try:
        store = dist.TCPStore(
            host,
            port,
            world_size,
            is_master=rank == 0 and not of_launcher,
            timeout=timedelta(seconds=seconds),
            wait_for_workers=False,
        )
    except RuntimeError as error:
        raise RankError(
            f"rank {rank} found nobody at {host}:{port} in {seconds:g} s: rank 0 never started, or "
            f"MASTER_ADDR and MASTER_PORT are wrong ({_short(error)})"
        ) from error
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = dist.distributed_c10d.PrefixStore(f"modelopt_lite/{attempt}", store)
    store.set(f"started/{rank}", b"1")
    deadline = time.monotonic() + seconds
    missing = set(range(world_size)) - {rank}
    while missing := {r for r in missing if not store.check([f"started/{r}"])}:
        if time.monotonic() > deadline:
            names = ", ".join(map(str, sorted(missing)))
            raise RankError(
                f"of {counted(world_size, 'rank')}, these never started: {names} (rank {rank} "
                f"waited {seconds:g} s; {START_VARIABLE} changes that); look at their output, or "
                "start as many processes as WORLD_SIZE says"
            )
        time.sleep(0.05)
    return store, rank, world_size


class Failures:
    """Watches the other ranks from a thread of its own; leaving it with an error tells them.

    Args:
        store: The store of all ranks.
        rank: This process.
        world_size: How many there are.
    """

    def __init__(self, store: Any, rank: int, world_size: int) -> None:
        global _runs  # noqa: PLW0603
        _runs += 1
        self._store, self._rank, self._world_size = store, rank, world_size
        self._prefix = f"run{_runs}"
        self._error: RankError | None = None
        self._closed = threading.Event()
        self._lock = threading.Lock()
        now = time.monotonic()
        self._seen = {r: (0, now) for r in range(world_size) if r != rank}
        self._thread = threading.Thread(target=self._watch, name="ranks", daemon=True)

    def __enter__(self) -> Failures:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._closed.set()
        self._thread.join()
        if error is None:
            return
        with suppress(RuntimeError):  # the store is gone, and who could be told with it
            if self._error is None:
                self._tell(error)
            else:
                self._store.add(self._key("ended"), 1)

    def check(self) -> None:
        """Raise what is known of another rank's failure.

        Raises:
            RankError: It has the rank and its error.
        """
        if self._error is not None:
            raise self._error

    def lost(self, error: Exception) -> RankError:
        """Return why a connection was lost: waits a little until something is known."""
        deadline = time.monotonic() + 4 * _BEAT
        while self._error is None and time.monotonic() < deadline:
            time.sleep(0.05)
        if self._error is None:
            now = time.monotonic()
            silent = [r for r, (_, at) in self._seen.items() if now - at > 2.5 * _BEAT]
            self._error = self._dead(silent, _short(error))
        return self._error

    def _watch(self) -> None:
        try:
            while not self._closed.wait(_BEAT / 4):
                self._store.add(self._key("beat", self._rank), 1)
                self._look()
                if self._error is not None:
                    return
        except RuntimeError as error:
            if not self._closed.is_set():
                self._error = RankError(
                    f"the meeting point of all ranks is gone ({_short(error)}): rank 0 or the "
                    "launcher ended; look at its output"
                )

    def _look(self) -> None:
        if self._store.check([self._key("error")]):
            self._error = self._read()
            return
        now = time.monotonic()
        for rank, (count, at) in self._seen.items():
            beats = self._store.add(self._key("beat", rank), 0)
            if beats != count:
                self._seen[rank] = beats, now
            elif now - at > SILENCE:
                self._error = self._dead([rank], f"no sign of life for {SILENCE:g} s")
                return

    def _read(self) -> RankError:
        told = json.loads(self._store.get(self._key("error")))
        return RankError(
            f"rank {told['rank']} failed: {told['message']} [{told['code']}]",
            keeps=told["keeps"],
        )

    def _tell(self, error: BaseException) -> None:
        code = error.code if isinstance(error, ModelOptLiteError) else type(error).__name__
        told = {
            "rank": self._rank,
            "code": code,
            "message": str(error) or "it was interrupted",
            "keeps": keeps_work(error),
        }
        key = self._key("error")
        if self._store.add(self._key("failed"), 1) > 1:  # another was first, and waits
            self._store.add(self._key("ended"), 1)
            return
        self._store.set(key, json.dumps(told))
        deadline = time.monotonic() + _CLEANING
        while time.monotonic() < deadline:
            if self._store.add(self._key("ended"), 0) >= self._world_size - 1:
                return
            time.sleep(0.05)

    def _dead(self, ranks: list[int], why: str) -> RankError:
        who = f"rank {', '.join(map(str, ranks))}" if ranks else "another rank"
        return RankError(
            f"{who} ended without a word ({why}): it was killed, or its machine is out of memory "
            "or out of reach; look at its output and at the system's log",
            keeps=True,
        )

    def _key(self, *parts: object) -> str:
        return "/".join(map(str, (self._prefix, *parts)))


def keeps_work(error: BaseException) -> bool:
    """Whether a later run may go on from what is finished: nothing is wrong with the inputs."""
    if isinstance(error, RankError):
        return error.keeps
    return isinstance(error, KeyboardInterrupt) or getattr(error, "code", "") == "MOL500"


def _short(error: Exception) -> str:
    return str(error).partition("\n")[0][:200]
