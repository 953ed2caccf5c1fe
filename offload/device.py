"""The device seam: everything that the offload runtime asks of the place where weights are used.

Three devices answer: `HostDevice` here (a machine without an accelerator; weights move from disk or
host memory into a bounded arena on a copy thread), `AcceleratorDevice` in ``accelerator.py``, and
`SimDevice` in ``simdevice.py`` (tests: a virtual clock, and wrong numbers for a wrong order).

The rules are those of CUDA. A stream does its work in order; streams run side by side; an event
marks a point in a stream. Stream None is the compute stream: that on which the caller's own torch
operations run. Unlike CUDA, using an event that was never recorded is an error, since a wait for it
would protect nothing.
"""

from __future__ import annotations

import itertools
import platform
import time
import weakref
from typing import Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from modelopt_lite.offload.copythread import CopyThread, DeviceError, Mark
from modelopt_lite.offload.hostmemory import host_memory
from modelopt_lite.offload.hugepages import whole_pages

__all__ = [
    "CopySource",
    "Device",
    "DeviceError",
    "DiskSource",
    "Event",
    "HostDevice",
    "MemoryInfo",
    "PinMode",
    "Stream",
    "as_bytes",
    "check_copy",
    "current_device",
]

PinMode = Literal["torch", "host_register", "in_place"]


class MemoryInfo(NamedTuple):
    """Bytes that can still be allocated on a device, and bytes that it has."""

    free: int
    total: int


@runtime_checkable
class DiskSource(Protocol):
    """Bytes that are not in memory."""

    def read_into(self, dst: Tensor, /) -> None:
        """Fill ``dst``, uint8 [B] in host memory, wholly. Runs on a copy thread."""


CopySource = Tensor | DiskSource


class Stream:
    """A queue of copies. Made by `Device.stream`; of use only with that device."""

    def __init__(self, name: str) -> None:
        self.name = name


class Event:
    """A point in a stream. Made by `Device.event`; recording it again moves it."""

    def __init__(self, timing: bool) -> None:
        self.timing = timing


class Device(Protocol):
    """What the runtime needs of a device. A method is called from one thread at a time.

    Attributes:
        name: Of the hardware; profiles are kept under it.
        torch_device: Where buffers are, and where inputs belong.
    """

    name: str
    torch_device: torch.device

    def allocate(self, nbytes: int) -> Tensor:
        """Return a buffer, uint8 [nbytes], undefined contents, safe to copy into at once.

        Raises:
            torch.OutOfMemoryError: It does not fit.
        """

    def free(self, buffer: Tensor) -> None:
        """Stop counting a buffer. Its memory goes when the last view of it does.

        Every copy into it must have been waited for by the compute stream.

        Raises:
            DeviceError: Not a buffer of this device, or freed before.
        """

    def stream(self, name: str = "copy") -> Stream:
        """Return a new stream for copies."""

    def event(self, *, timing: bool = False) -> Event:
        """Return an event; only with ``timing`` can `elapsed` use it."""

    def copy(self, dst: Tensor, src: CopySource, stream: Stream | None, *, label: str = "") -> None:
        """Queue a copy into a buffer or a view of one, and return at once.

        ``src`` must stay alive and unchanged until the copy is done. A source that raises leaves
        ``dst`` undefined; who waits for the next event recorded on the stream gets the exception.
        On the compute stream (None) the copy comes before the caller's next operation, and a source
        that raises does so here.

        Args:
            dst: Contiguous, any dtype.
            src: A contiguous host tensor of as many bytes, any dtype; or something on disk.
            stream: Where to queue it.
            label: Whose bytes they are; for errors and traces.
        """

    def record(self, event: Event, stream: Stream | None = None) -> None:
        """Let the event stand for all work queued on the stream so far."""

    def wait(self, event: Event, stream: Stream | None = None) -> None:
        """Let later work of the stream wait for the event; raise a failure that it covers."""

    def query(self, event: Event) -> bool:
        """Whether the work before the event is done. True also when it failed."""

    def synchronize(self, event: Event | None = None) -> None:
        """Block the caller until the event, or all work, is done; raise a failure among it."""

    def elapsed(self, start: Event, end: Event) -> float:
        """Return milliseconds between two timing events that are both done."""

    def capturing(self) -> bool:
        """Whether the compute stream is recorded into a graph now, instead of run."""

    def memory_info(self) -> MemoryInfo:
        """Return free and total bytes."""

    def pin(self, tensor: Tensor, mode: PinMode = "torch") -> Tensor:
        """Return the host tensor in memory from which copies to the device are asynchronous."""

    def close(self) -> None:
        """End threads and drop queued copies. Buffers stay. A second call does nothing."""


class _HostStream(Stream):
    def __init__(self, name: str, key: int) -> None:
        super().__init__(name)
        self.key = key


class _HostEvent(Event):
    mark: Mark | None = None
    time: float = 0.0  # seconds of perf_counter, once the mark is reached


class HostDevice:
    """A CPU-only machine: buffers are host memory, copies run on one thread, in order.

    Computing is what the caller's thread does, so it is done when the caller goes on. All streams
    share the one thread, which is the bus; a copy on the compute stream runs in the caller.

    Args:
        capacity: Bytes that buffers may take together. None: what the system has.
    """

    def __init__(self, capacity: int | None = None) -> None:
        self.name = f"host {platform.machine()}"
        self.torch_device = torch.device("cpu")
        self.capacity = capacity
        self.used = 0
        self._sizes: dict[int, int] = {}
        self._keys = itertools.count(1)
        self._thread = CopyThread("offload-copy")
        weakref.finalize(self, self._thread.close)

    def allocate(self, nbytes: int) -> Tensor:
        """See `Device.allocate`."""
        check_size(nbytes)
        if self.capacity is not None and self.used + nbytes > self.capacity:
            raise out_of_memory(self.name, nbytes, self.used, self.capacity)
        buffer = whole_pages(nbytes)
        self._sizes[buffer.data_ptr()] = nbytes
        self.used += nbytes
        return buffer

    def free(self, buffer: Tensor) -> None:
        """See `Device.free`."""
        nbytes = self._sizes.pop(buffer.data_ptr(), None)
        if nbytes is None:
            raise DeviceError("free: not a buffer of this device, or freed before")
        self.used -= nbytes

    def stream(self, name: str = "copy") -> Stream:
        """See `Device.stream`."""
        return _HostStream(name, next(self._keys))

    def event(self, *, timing: bool = False) -> Event:
        """See `Device.event`."""
        return _HostEvent(timing)

    def copy(self, dst: Tensor, src: CopySource, stream: Stream | None, *, label: str = "") -> None:
        """See `Device.copy`."""
        check_copy(dst, src)
        if self._thread.closed:
            raise DeviceError(f"{self.name}: closed; copies can no longer be made")
        if stream is None:
            fill(dst, src, label)
            return
        self._thread.submit(_host_stream(stream).key, lambda: fill(dst, src, label))

    def record(self, event: Event, stream: Stream | None = None) -> None:
        """See `Device.record`."""
        host_event = _host_event(event)
        host_event.mark = mark = Mark(0)
        if stream is None:
            host_event.time = time.perf_counter()
            return

        def stamp() -> None:
            if host_event.mark is mark:
                host_event.time = time.perf_counter()

        self._thread.mark(_host_stream(stream).key, mark, stamp)

    def wait(self, event: Event, stream: Stream | None = None) -> None:
        """See `Device.wait`. Between copy streams the order of the one thread is enough."""
        mark = _mark(event)
        if stream is None:
            self._wait(mark)

    def query(self, event: Event) -> bool:
        """See `Device.query`."""
        return self._thread.reached(_mark(event))

    def synchronize(self, event: Event | None = None) -> None:
        """See `Device.synchronize`."""
        if event is None:
            self._thread.drain()
        else:
            self._wait(_mark(event))

    def elapsed(self, start: Event, end: Event) -> float:
        """See `Device.elapsed`."""
        for event in (start, end):
            check_timing(event, done=self.query(event))
        return (_host_event(end).time - _host_event(start).time) * 1e3

    def capturing(self) -> bool:
        """See `Device.capturing`."""
        return False

    def memory_info(self) -> MemoryInfo:
        """See `Device.memory_info`. With a capacity, what is left of it."""
        free, total = host_memory()
        if self.capacity is None:
            return MemoryInfo(free, total)
        return MemoryInfo(min(self.capacity - self.used, free), min(self.capacity, total))

    def pin(self, tensor: Tensor, mode: PinMode = "torch") -> Tensor:
        """Return the tensor itself: there is no bus to pin for."""
        return tensor

    def close(self) -> None:
        """See `Device.close`."""
        self._thread.close()

    def _wait(self, mark: Mark) -> None:
        if mark.position:  # computing is done by the time it is recorded
            self._thread.wait(mark)


def current_device(index: int = 0, *, host_capacity: int | None = None) -> Device:
    """Return a device: accelerator ``index`` where torch has one, else the host.

    Apple's MPS shares the host's memory and has no streams in torch: there, too, the host.

    Args:
        index: Which accelerator; ignored on a machine without.
        host_capacity: `HostDevice`'s capacity in bytes.

    Raises:
        DeviceError: There are accelerators, but none of that index.
    """
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or accelerator.type == "mps" or not torch.accelerator.is_available():
        return HostDevice(host_capacity)
    from modelopt_lite.offload.accelerator import AcceleratorDevice

    return AcceleratorDevice(index)


# --- shared by the devices


def as_bytes(tensor: Tensor) -> Tensor:
    """View a contiguous tensor as uint8 [B]."""
    return tensor.detach().reshape(-1).view(torch.uint8)


def new_buffer(nbytes: int, device: torch.device) -> Tensor:
    """Allocate uint8 [nbytes]; never as an inference tensor, which could not be refilled later."""
    with torch.inference_mode(False):
        return torch.empty(nbytes, dtype=torch.uint8, device=device)


def check_size(nbytes: int) -> None:
    """Raise DeviceError unless a buffer can have this size."""
    if nbytes <= 0:
        raise DeviceError(f"a buffer of {nbytes} bytes; ask for at least one byte")


def check_copy(dst: Tensor, src: CopySource) -> None:
    """Raise DeviceError unless the bytes of ``src`` can be put into ``dst`` as they are."""
    if not dst.is_contiguous():
        raise DeviceError(f"copy into a tensor with strides {dst.stride()}; give a contiguous one")
    if isinstance(src, Tensor):
        if src.device.type != "cpu" or not src.is_contiguous():
            raise DeviceError(
                f"copy from a tensor on {src.device} with strides {src.stride()}; "
                "give a contiguous host tensor"
            )
        if src.nbytes != dst.nbytes:
            raise DeviceError(f"copy of {src.nbytes} bytes into {dst.nbytes}; sizes must be equal")


def check_timing(event: Event, *, done: bool) -> None:
    """Raise DeviceError unless the time of an event is known."""
    if not event.timing:
        raise DeviceError("elapsed: the event keeps no time; make it with event(timing=True)")
    if not done:
        raise DeviceError("elapsed: the event is not done; synchronize it first")


def out_of_memory(name: str, nbytes: int, used: int, capacity: int) -> torch.OutOfMemoryError:
    """Return the error of a buffer that does not fit."""
    return torch.OutOfMemoryError(
        f"{name}: {nbytes} bytes asked for, {used} of {capacity} in use; "
        "lower the budget or raise the capacity"
    )


def fill(dst: Tensor, src: CopySource, label: str) -> None:
    """Copy into host memory on this thread; an exception says whose bytes they were.

    numpy copies on one core and without the interpreter's lock: torch would start its worker
    threads against those that compute.
    """
    try:
        if not isinstance(src, Tensor):
            src.read_into(as_bytes(dst))
        elif dst.nbytes:
            np.copyto(as_bytes(dst).numpy(), as_bytes(src).numpy())
    except BaseException as error:
        if label:
            error.add_note(f"while the weights of {label!r} were brought in")
        raise


def never_recorded() -> DeviceError:
    """Return the error of an event that stands for nothing."""
    return DeviceError("the event was never recorded; a wait for it would protect nothing")


def foreign(what: Stream | Event) -> DeviceError:
    """Return the error of a stream or event of another device."""
    return DeviceError(f"{type(what).__name__} of another device; make it with this one")


def _host_stream(stream: Stream) -> _HostStream:
    if not isinstance(stream, _HostStream):
        raise foreign(stream)
    return stream


def _host_event(event: Event) -> _HostEvent:
    if not isinstance(event, _HostEvent):
        raise foreign(event)
    return event


def _mark(event: Event) -> Mark:
    mark = _host_event(event).mark
    if mark is None:
        raise never_recorded()
    return mark
