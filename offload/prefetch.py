"""Read units from a checkpoint ahead of their turn, on a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Container, Sequence
from types import TracebackType

from modelopt_lite.offload.store import Loaded, WeightStore
from modelopt_lite.offload.units import Unit
from modelopt_lite.process import compute_on


class Prefetcher:
    """Has the next units in memory when they are asked for, within a budget.

    The order is a hint: a unit that is asked for out of turn is read while the caller waits, and
    reading ahead goes on behind it. What was read ahead and passed over is dropped, and read again
    should it be asked for after all.

    Args:
        store: Where units come from.
        order: Units in the order in which they are expected; one may come several times.
        budget: Bytes of units in memory, those in use and those ahead. A unit that alone is larger
            is read when it is asked for and nothing else can be dropped: a budget of one unit reads
            nothing ahead.
        resident: Units that stay in memory once they were read, to the end.
        arrived: Called with each unit that was read, on the thread that read it.

    Attributes:
        peak: The most bytes of units that were in memory at a time.
        late: How many units were not in memory, nor on their way, when they were asked for.
    """

    def __init__(
        self,
        store: WeightStore,
        order: Sequence[Unit],
        *,
        budget: int,
        resident: Container[str] = (),
        arrived: Callable[[Loaded], None] | None = None,
    ) -> None:
        self._store = store
        self._arrived = arrived
        self._order = list(order)
        self._turns: dict[str, list[int]] = {}
        for index, unit in enumerate(self._order):
            self._turns.setdefault(unit.name, []).append(index)
        self._budget = budget
        self._resident = resident
        self._staying: dict[str, Loaded] = {}
        self._next = 0
        self._ready: dict[str, Loaded] = {}
        self._turn_of: dict[str, int] = {}  # in which turn what is ready was read
        self._reading: str | None = None
        self._used = self.peak = self.late = 0
        self._error: BaseException | None = None
        self._closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._read_ahead, name="reader", daemon=True)

    def __enter__(self) -> Prefetcher:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()
        while self._staying:
            self._store.release(self._staying.popitem()[1])

    def take(self, unit: Unit) -> Loaded:
        """Return a unit's weights, in memory; `done` gives the memory back.

        Raises:
            CheckpointError: It cannot be read.
        """
        with self._changed:
            if (loaded := self._staying.get(unit.name)) is not None:
                return loaded
            self._make_way(unit)
            while unit.name not in self._ready and self._reading == unit.name:
                self._changed.wait()
            if (loaded := self._ready.pop(unit.name, None)) is not None:
                return loaded
            if self._error is not None:
                raise self._error
            self.late += 1
            self._use(self._store.bytes_of(unit))
        return self._load(unit)

    def done(self, loaded: Loaded) -> None:
        """Give the memory of a unit back, unless it stays; from any thread."""
        name = loaded.unit.name
        if name in self._resident and self._staying.setdefault(name, loaded) is loaded:
            return
        size = self._store.bytes_of(loaded.unit)
        self._store.release(loaded)
        with self._changed:
            self._use(-size)

    def _load(self, unit: Unit) -> Loaded:
        loaded = self._store.load(unit)
        if self._arrived is not None:
            self._arrived(loaded)
        return loaded

    def _make_way(self, unit: Unit) -> None:
        """Drop what stands in the way of a unit that is not in memory, nor on its way."""
        if unit.name in self._ready or self._reading == unit.name:
            return
        while self._reading is not None:
            self._changed.wait()
        turns = self._turns.get(unit.name, ())
        ahead = next((turn for turn in turns if turn >= self._next), None)
        if ahead is not None:  # it comes sooner than expected
            self._next = ahead + 1
            for name in list(self._ready):
                self._drop(name)
        size = self._store.bytes_of(unit)
        while self._ready and self._used + size > self._budget:
            last = max(self._ready, key=self._turn_of.__getitem__)
            self._drop(last)
            self._next = min(self._next, self._turn_of[last])

    def _drop(self, name: str) -> None:
        loaded = self._ready.pop(name)
        size = self._store.bytes_of(loaded.unit)
        self._store.release(loaded)
        self._use(-size)

    def _use(self, size: int) -> None:
        self._used += size
        self.peak = max(self.peak, self._used)
        self._changed.notify_all()

    def _read_ahead(self) -> None:
        if self._arrived is not None:
            compute_on(1)  # it runs beside the model
        while True:
            with self._changed:
                while not self._closed and not self._may_read():
                    self._changed.wait()
                if self._closed:
                    return
                unit = self._order[self._next]
                self._turn_of[unit.name] = self._next
                self._next += 1
                self._reading = unit.name
                self._use(self._store.bytes_of(unit))
            loaded, error = None, None
            try:
                loaded = self._load(unit)
            except BaseException as raised:  # the caller's thread is the one to raise it
                error = raised
            with self._changed:
                self._reading = None
                self._error = error
                if loaded is not None:
                    self._ready[unit.name] = loaded
                self._changed.notify_all()
            if error is not None:
                return

    def _may_read(self) -> bool:
        if self._next >= len(self._order) or self._order[self._next].name in self._ready:
            return False
        size = self._store.bytes_of(self._order[self._next])
        return self._used + size <= self._budget
