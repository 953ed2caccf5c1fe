"""A device for tests: a virtual clock, a capacity, and wrong numbers wherever an order is not kept.

Copies do what their source and destination say, but as late as the waits allow: only when someone
waits for them. Computing is what the caller's own torch operations do, at once. A slot holds NaN
from its allocation, from the moment in which it is handed on to another label, and after it is
freed. So a read without the wait that it needs gives NaN, each time.

The other half of a wrong order, a copy into a slot whose last reader it does not wait for, cannot
show in numbers here (the reader has already run). It is found from who waited for whom: every
stream carries a vector clock, and so does the host. `check` reports such races.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from modelopt_lite.offload.copythread import FailureLog, Mark
from modelopt_lite.offload.device import (
    CopySource,
    DeviceError,
    Event,
    MemoryInfo,
    PinMode,
    Stream,
    check_copy,
    check_size,
    check_timing,
    fill,
    foreign,
    never_recorded,
    new_buffer,
    out_of_memory,
)
from modelopt_lite.offload.simslots import Clock, Region, Slot, covers, joined
from modelopt_lite.offload.timeline import Op, Span

_COMPUTE = 0
_POLL_MS = 1e-3  # what the host spends on a query that says no


def gigabytes_per_second(rate: float) -> Callable[[int], float]:
    """Return a transfer curve, bytes -> milliseconds, of so many 10**9 bytes a second."""
    return lambda nbytes: nbytes / (rate * 1e6)


class _SimStream(Stream):
    def __init__(self, name: str, key: int) -> None:
        super().__init__(name)
        self.key = key
        self.time = 0.0
        self.clock: Clock = {}
        self.queue: deque[_Queued] = deque()
        self.label = ""  # of the last copy


@dataclass(slots=True)
class _Queued:
    position: int
    work: Callable[[], None]
    copies: bool = False


@dataclass(slots=True, eq=False)
class _SimMark(Mark):
    stream: _SimStream | None = None
    time: float = 0.0
    clock: Clock = field(default_factory=dict)
    label: str = ""


class _SimEvent(Event):
    mark: _SimMark | None = None


class SimDevice:
    """A `Device` whose time is counted, not measured.

    The host is infinitely fast: a copy or computation begins when its stream, what the stream waits
    for, and (a copy) the one bus are free. Copies take the bus in the order in which they are
    queued.

    Args:
        capacity: Bytes that buffers may take together.
        curve: Bytes -> milliseconds of a copy.
        host_blocks: `compute` occupies the host, as on a CPU-only machine: what is queued after it
            begins after it.

    Attributes:
        trace: Every copy, computation and wait of the compute stream, times in virtual ms.
        violations: Every race that was seen, as text.
        used: Bytes allocated now.
        peak: The most that were allocated at once.
    """

    def __init__(
        self,
        capacity: int,
        *,
        curve: Callable[[int], float] | None = None,
        host_blocks: bool = False,
    ) -> None:
        self.name = "sim"
        self.torch_device = torch.device("cpu")
        self.capacity = capacity
        self.trace: list[Span] = []
        self.violations: list[str] = []
        self.used = self.peak = 0
        self._curve = curve or gigabytes_per_second(1.0)
        self._host_blocks = host_blocks
        self._compute = _SimStream("compute", _COMPUTE)
        self._streams = [self._compute]
        self._slots: dict[int, Slot] = {}
        self._homes: dict[str, dict[Slot, int]] = {}  # label -> slots and their generation then
        self._failures = FailureLog()
        self._positions = self._slot_count = 0
        self._host_time = self._bus_time = 0.0
        self._host_clock: Clock = {}
        self._closed = False

    # --- memory

    def allocate(self, nbytes: int) -> Tensor:
        """See `Device.allocate`. The buffer reads NaN."""
        check_size(nbytes)
        if self.used + nbytes > self.capacity:
            raise out_of_memory(self.name, nbytes, self.used, self.capacity)
        buffer = new_buffer(nbytes, self.torch_device)
        self._slots[buffer.data_ptr()] = slot = Slot(self._slot_count, buffer)
        slot.spoil()
        self._slot_count += 1
        self.used += nbytes
        self.peak = max(self.peak, self.used)
        return buffer

    def free(self, buffer: Tensor) -> None:
        """See `Device.free`. Views that are left read NaN."""
        slot = self._slots.pop(buffer.data_ptr(), None)
        if slot is None:
            raise DeviceError("free: not a buffer of this device, or freed before")
        known = joined(self._compute.clock, self._host_clock)
        if not covers(known, slot.writes):
            self._violate(f"slot {slot.index} is freed while a copy of {slot.label!r} may run")
        slot.spoil()
        for homes in self._homes.values():
            homes.pop(slot, None)
        self.used -= slot.memory.nbytes

    def capturing(self) -> bool:
        """See `Device.capturing`."""
        return False

    def memory_info(self) -> MemoryInfo:
        """See `Device.memory_info`."""
        return MemoryInfo(self.capacity - self.used, self.capacity)

    def pin(self, tensor: Tensor, mode: PinMode = "torch") -> Tensor:
        """Return the tensor itself."""
        return tensor

    # --- streams and events

    def stream(self, name: str = "copy") -> Stream:
        """See `Device.stream`."""
        stream = _SimStream(name, len(self._streams))
        self._streams.append(stream)
        return stream

    def event(self, *, timing: bool = False) -> Event:
        """See `Device.event`."""
        return _SimEvent(timing)

    def copy(self, dst: Tensor, src: CopySource, stream: Stream | None, *, label: str = "") -> None:
        """See `Device.copy`. The slot reads NaN until someone waits for the copy."""
        check_copy(dst, src)
        target = self._open_stream(stream)
        slot = self._slots.get(dst.untyped_storage().data_ptr())
        if slot is None:
            raise DeviceError("copy into memory that is no buffer of this device, or was freed")
        self._tick(target)
        begin = int(dst.storage_offset()) * dst.itemsize
        region = Region(begin, begin + dst.nbytes, _dtype(dst, src))
        self._take(slot, region, label, target)
        start = max(target.time, self._bus_time, self._host_time)
        target.time = self._bus_time = start + self._curve(dst.nbytes)
        self._span("copy", target, label, start, slot=slot.index, nbytes=dst.nbytes)
        target.label = label
        generation = slot.generation

        def work() -> None:
            stale = slot.generation != generation  # handed on: it keeps its NaN
            fill(torch.empty_like(dst) if stale else dst, src, label)

        if target is self._compute:
            self._follow_compute()
            work()
        else:
            target.queue.append(_Queued(self._position(), work, copies=True))

    def record(self, event: Event, stream: Stream | None = None) -> None:
        """See `Device.record`."""
        _sim_event(event).mark = self._mark(self._open_stream(stream))

    def wait(self, event: Event, stream: Stream | None = None) -> None:
        """See `Device.wait`."""
        mark, target = _recorded(event), self._open_stream(stream)
        assert mark.stream is not None
        source = mark.stream
        if target is not self._compute:
            queued = _Queued(self._position(), lambda: self._run(source, mark.position))
            target.queue.append(queued)
        target.clock = joined(target.clock, mark.clock)
        before, target.time = target.time, max(target.time, mark.time)
        if target is self._compute:
            if target.time > before:
                self._span("wait", target, mark.label, before)
            self._follow_compute()
            self._run(source, mark.position)
            self._failures.raise_for(mark)

    def query(self, event: Event) -> bool:
        """See `Device.query`. A query that says no takes the host a microsecond."""
        mark = _recorded(event)
        if mark.time > self._host_time:
            self._host_time += _POLL_MS
            return False
        self._host_knows(mark)
        return True

    def synchronize(self, event: Event | None = None) -> None:
        """See `Device.synchronize`."""
        marks = [self._mark(s) for s in self._streams] if event is None else [_recorded(event)]
        for mark in marks:
            self._host_time = max(self._host_time, mark.time)
            self._host_knows(mark)
        self._failures.raise_for(Mark(self._positions) if event is None else marks[0])

    def elapsed(self, start: Event, end: Event) -> float:
        """See `Device.elapsed`."""
        for event in (start, end):
            check_timing(event, done=self.query(event))
        return _recorded(end).time - _recorded(start).time

    def close(self) -> None:
        """See `Device.close`."""
        self._closed = True
        for stream in self._streams:
            stream.queue.clear()
        self._failures.clear()

    # --- what only a simulation has

    def compute(self, label: str, ms: float) -> None:
        """Say that the compute stream now works ``ms`` milliseconds with the weights of ``label``.

        It reads every slot that the label was copied to. A label that never was is resident.
        """
        self._tick(self._compute)
        for slot, generation in self._homes.get(label, {}).items():
            if slot.generation != generation:
                self._violate(
                    f"{label!r} computes after its slot {slot.index} was handed on to "
                    f"{slot.label!r}"
                )
                continue
            if not covers(joined(self._compute.clock, self._host_clock), slot.writes):
                self._violate(f"{label!r} computes before its copy to slot {slot.index} is done")
            slot.reads[_COMPUTE] = self._compute.clock[_COMPUTE]
        start = max(self._compute.time, self._host_time)
        self._compute.time = start + ms
        self._span("compute", self._compute, label, start)
        self._follow_compute()

    @property
    def now(self) -> float:
        """Milliseconds at which all that was queued so far is done."""
        return max(stream.time for stream in self._streams)

    def check(self) -> None:
        """Raise if an order was not kept anywhere.

        Raises:
            DeviceError: It lists the violations.
        """
        if self.violations:
            raise DeviceError("orders were not kept:\n" + "\n".join(self.violations))

    def _take(self, slot: Slot, region: Region, label: str, stream: _SimStream) -> None:
        """Let a copy have its part of a slot."""
        self.violations += slot.races(joined(stream.clock, self._host_clock), label)
        homes = self._homes.setdefault(label, {})
        if slot.take(region, label):
            for home in [home for home in homes if home.generation != homes[home]]:
                del homes[home]
        slot.writes[stream.key] = stream.clock[stream.key]
        homes[slot] = slot.generation

    def _run(self, stream: _SimStream, position: int) -> None:
        """Do what is queued on a stream up to a position."""
        while stream.queue and stream.queue[0].position <= position:
            queued = stream.queue.popleft()
            if queued.copies:
                self._failures.begin(stream.key)
            try:
                queued.work()
            except BaseException as error:  # kept for whoever waits, as on every device
                self._failures.add(stream.key, queued.position, error)

    def _mark(self, stream: _SimStream) -> _SimMark:
        mark = _SimMark(self._position(), None, stream, stream.time, stream.clock, stream.label)

        def seal() -> None:
            mark.failure = self._failures.seal(stream.key)

        stream.queue.append(_Queued(mark.position, seal))
        return mark

    def _host_knows(self, mark: _SimMark) -> None:
        assert mark.stream is not None
        self._host_clock = joined(self._host_clock, mark.clock)
        self._run(mark.stream, mark.position)

    def _follow_compute(self) -> None:
        if self._host_blocks:
            self._host_time = max(self._host_time, self._compute.time)
            self._host_clock = joined(self._host_clock, self._compute.clock)

    def _tick(self, stream: _SimStream) -> None:
        """Begin an operation: what the host knows to be done comes before it."""
        clock = joined(stream.clock, self._host_clock)
        stream.clock = clock | {stream.key: clock.get(stream.key, 0) + 1}

    def _position(self) -> int:
        self._positions += 1
        return self._positions

    def _open_stream(self, stream: Stream | None) -> _SimStream:
        if self._closed:
            raise DeviceError("sim: closed; copies can no longer be made or waited for")
        if stream is None:
            return self._compute
        if not isinstance(stream, _SimStream):
            raise foreign(stream)
        return stream

    def _violate(self, text: str) -> None:
        self.violations.append(text)

    def _span(
        self,
        op: Op,
        stream: _SimStream,
        label: str,
        start: float,
        *,
        slot: int = -1,
        nbytes: int = 0,
    ) -> None:
        self.trace.append(Span(op, stream.name, label, slot, nbytes, start, stream.time))


def _dtype(dst: Tensor, src: CopySource) -> torch.dtype:
    """Return as what the bytes will be read, as far as is known: uint8 stands for any."""
    return src.dtype if dst.dtype == torch.uint8 and isinstance(src, Tensor) else dst.dtype


def _sim_event(event: Event) -> _SimEvent:
    if not isinstance(event, _SimEvent):
        raise foreign(event)
    return event


def _recorded(event: Event) -> _SimMark:
    mark = _sim_event(event).mark
    if mark is None:
        raise never_recorded()
    return mark
