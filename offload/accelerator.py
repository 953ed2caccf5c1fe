"""The device of a machine with an accelerator, through torch.accelerator; CUDA first.

What torch.accelerator lacks is asked of the module of the device's type (``torch.cuda``), here and
nowhere else.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor

from modelopt_lite.offload.copythread import CopyThread, Mark
from modelopt_lite.offload.device import (
    CopySource,
    DeviceError,
    DiskSource,
    Event,
    MemoryInfo,
    PinMode,
    Stream,
    as_bytes,
    check_copy,
    check_size,
    check_timing,
    foreign,
    never_recorded,
    new_buffer,
)

_STAGES = 2  # one is read into while the other is copied from


class _Staging:
    """Pinned host buffers through which bytes from disk reach the accelerator."""

    def __init__(self) -> None:
        self._buffers: list[Tensor | None] = [None] * _STAGES
        self._copied: list[torch.Event | None] = [None] * _STAGES
        self._next = 0

    @property
    def nbytes(self) -> int:
        return sum(0 if buffer is None else buffer.nbytes for buffer in self._buffers)

    def fill(self, source: DiskSource, nbytes: int) -> tuple[Tensor, int]:
        """Read a source into the buffer that is free soonest; return its bytes and its index."""
        index, self._next = self._next, (self._next + 1) % _STAGES
        copied, buffer = self._copied[index], self._buffers[index]
        if copied is not None:
            copied.synchronize()
        if buffer is None or buffer.nbytes < nbytes:
            self._buffers[index] = None  # not both at once
            buffer = new_buffer(nbytes, torch.device("cpu")).pin_memory()
            self._buffers[index] = buffer
        source.read_into(buffer[:nbytes])
        return buffer[:nbytes], index

    def copied(self, index: int, event: torch.Event) -> None:
        """Say after which event the buffer may be filled again."""
        self._copied[index] = event


class _AcceleratorStream(Stream):
    """A torch stream. Once a disk source came, one thread does everything that is queued on it."""

    def __init__(self, name: str, native: torch.Stream) -> None:
        super().__init__(name)
        self.native = native
        self.staging = _Staging()
        self.thread: CopyThread | None = None

    def queue(self, work: Callable[[], None]) -> None:
        """Do ``work`` now, or after what the thread still has to do."""
        if self.thread is None:
            work()
        else:
            self.thread.submit(0, work)


class _AcceleratorEvent(Event):
    """A torch event, a new one at every recording: the thread may still have to use the old."""

    native: torch.Event | None = None
    mark: Mark | None = None  # where a thread's stream recorded it
    thread: CopyThread | None = None


class AcceleratorDevice:
    """One accelerator.

    Copies from disk are read by a thread of their stream, through two pinned staging buffers as
    large as the largest of them. A wait for such a copy blocks the caller until it has been read,
    and the compute stream until it has arrived.

    Args:
        index: Which one, from 0.

    Raises:
        DeviceError: There is no such accelerator.
    """

    def __init__(self, index: int = 0) -> None:
        kind = torch.accelerator.current_accelerator()
        count = torch.accelerator.device_count()
        if kind is None or not 0 <= index < count:
            raise DeviceError(
                f"accelerator {index}: torch sees {count}; choose one below that, or check its "
                "driver and this torch build"
            )
        self._module: Any = torch.get_device_module(kind.type)
        self._index = index
        self.torch_device = torch.device(kind.type, index)
        name = getattr(self._module, "get_device_name", None)
        self.name = str(name(index)) if name else str(self.torch_device)
        self._fresh: dict[int, torch.Event] = {}
        self._buffers: dict[int, int] = {}
        self._registered: dict[int, Tensor] = {}
        self._streams: list[_AcceleratorStream] = []
        self._staging = _Staging()  # of the compute stream
        self._closed = False

    @property
    def staging_bytes(self) -> int:
        """Pinned host memory that copies from disk use."""
        return self._staging.nbytes + sum(stream.staging.nbytes for stream in self._streams)

    def allocate(self, nbytes: int) -> Tensor:
        """See `Device.allocate`.

        The allocator may hand out memory that queued work of the compute stream still uses; the
        first copy into it waits for that.
        """
        check_size(nbytes)
        buffer = new_buffer(nbytes, self.torch_device)
        self._buffers[buffer.data_ptr()] = nbytes
        self._fresh[buffer.data_ptr()] = self._record_native(self._compute())
        return buffer

    def free(self, buffer: Tensor) -> None:
        """See `Device.free`."""
        if self._buffers.pop(buffer.data_ptr(), None) is None:
            raise DeviceError("free: not a buffer of this device, or freed before")
        self._fresh.pop(buffer.data_ptr(), None)

    def stream(self, name: str = "copy") -> Stream:
        """See `Device.stream`."""
        stream = _AcceleratorStream(name, torch.Stream(device=self.torch_device))
        self._streams.append(stream)
        return stream

    def event(self, *, timing: bool = False) -> Event:
        """See `Device.event`."""
        return _AcceleratorEvent(timing)

    def copy(self, dst: Tensor, src: CopySource, stream: Stream | None, *, label: str = "") -> None:
        """See `Device.copy`. From memory that is not pinned the caller may block."""
        check_copy(dst, src)
        if self._closed:
            raise DeviceError(f"{self.name}: closed; copies can no longer be made")
        fresh = self._fresh.pop(dst.untyped_storage().data_ptr(), None)
        if stream is None:
            self._copy_now(dst, src, self._compute(), fresh, label, self._staging)
            return
        target = _native_stream(stream)
        if not isinstance(src, Tensor) and target.thread is None:
            target.thread = CopyThread(f"offload-{target.name}")
            weakref.finalize(self, target.thread.close)
        target.queue(lambda: self._copy_now(dst, src, target.native, fresh, label, target.staging))

    def record(self, event: Event, stream: Stream | None = None) -> None:
        """See `Device.record`."""
        own = _native_event(event)
        native = torch.Event(device=self.torch_device, enable_timing=own.timing)
        own.native, own.mark, own.thread = native, None, None
        if stream is None:
            native.record(self._compute())
            return
        target = _native_stream(stream)
        if target.thread is None:
            native.record(target.native)
            return
        own.mark, own.thread = Mark(0), target.thread
        target.thread.mark(0, own.mark, lambda: native.record(target.native))

    def wait(self, event: Event, stream: Stream | None = None) -> None:
        """See `Device.wait`."""
        if stream is None:
            self._settled(event).wait(self._compute())
            return
        own, target = _native_event(event), _native_stream(stream)
        # Where one thread records and waits, its order is enough.
        same = own.thread is not None and own.thread is target.thread
        native = own.native if same and own.native is not None else self._settled(event)
        target.queue(lambda: native.wait(target.native))

    def query(self, event: Event) -> bool:
        """See `Device.query`."""
        own = _native_event(event)
        if own.native is None:
            raise never_recorded()
        if own.thread is not None and own.mark is not None and not own.thread.reached(own.mark):
            return False
        return bool(own.native.query())

    def synchronize(self, event: Event | None = None) -> None:
        """See `Device.synchronize`."""
        if event is not None:
            self._settled(event).synchronize()
            return
        for stream in self._streams:
            if stream.thread is not None:
                stream.thread.drain()
        torch.accelerator.synchronize(self.torch_device)

    def elapsed(self, start: Event, end: Event) -> float:
        """See `Device.elapsed`."""
        for event in (start, end):
            check_timing(event, done=self.query(event))
        return float(self._settled(start).elapsed_time(self._settled(end)))

    def capturing(self) -> bool:
        """See `Device.capturing`. Accelerators without graphs never are."""
        ask = getattr(self._module, "is_current_stream_capturing", None)
        return bool(ask is not None and ask())

    def memory_info(self) -> MemoryInfo:
        """See `Device.memory_info`. What torch's allocator holds unused counts as free."""
        ask = getattr(torch.accelerator, "get_memory_info", None) or self._module.mem_get_info
        free, total = ask(self.torch_device)
        reserved = self._module.memory_reserved(self.torch_device)
        cached = reserved - self._module.memory_allocated(self.torch_device)
        return MemoryInfo(int(free + cached), int(total))

    def pin(self, tensor: Tensor, mode: PinMode = "torch") -> Tensor:
        """See `Device.pin`.

        ``host_register`` pins the memory where it is, so that it costs no second copy and no
        rounding up to a power of two; where that fails, a warning, and a pinned copy. ``in_place``
        makes no copy then either: the tensor stays as it is.
        """
        if tensor.is_pinned():
            return tensor
        if mode != "torch":
            if self._register(tensor):
                return tensor
            instead = {
                "host_register": "they are copied to pinned memory, see pinned_memory_mode",
                "in_place": "copies from them will block",
            }[mode]
            warnings.warn(
                f"{self.name}: {tensor.nbytes} bytes of host memory cannot be pinned in place; "
                f"{instead}",
                RuntimeWarning,
                stacklevel=2,
            )
        return tensor if mode == "in_place" else tensor.pin_memory()

    def close(self) -> None:
        """See `Device.close`. Memory pinned in place is unpinned."""
        self._closed = True
        for stream in self._streams:
            if stream.thread is not None:
                stream.thread.close()
        if self._registered:
            torch.accelerator.synchronize(self.torch_device)
        while self._registered:
            address, _ = self._registered.popitem()
            self._module.cudart().cudaHostUnregister(address)

    # --- with torch's own streams and events

    def _compute(self) -> torch.Stream:
        return torch.accelerator.current_stream(self.torch_device)

    def _record_native(self, stream: torch.Stream) -> torch.Event:
        event = torch.Event(device=self.torch_device)
        event.record(stream)
        return event

    def _settled(self, event: Event) -> torch.Event:
        """Return torch's event, recorded: after the thread of its stream got there."""
        own = _native_event(event)
        if own.native is None:
            raise never_recorded()
        if own.thread is not None and own.mark is not None:
            own.thread.wait(own.mark)
        return own.native

    def _copy_now(
        self,
        dst: Tensor,
        src: CopySource,
        stream: torch.Stream,
        fresh: torch.Event | None,
        label: str,
        staging: _Staging,
    ) -> None:
        try:
            stage = None
            if isinstance(src, Tensor):
                host = as_bytes(src)
            else:
                host, stage = staging.fill(src, dst.nbytes)
            with self._on(stream):
                if fresh is not None:
                    fresh.wait(stream)
                as_bytes(dst).copy_(host, non_blocking=True)
                dst.record_stream(stream)
                if stage is not None:
                    staging.copied(stage, self._record_native(stream))
        except BaseException as error:
            if label:
                error.add_note(f"while the weights of {label!r} were brought in")
            raise

    @contextmanager
    def _on(self, stream: torch.Stream) -> Iterator[None]:
        """Make a stream current; afterwards the stream and the device are those of before."""
        device = self._module.current_device()
        before = torch.accelerator.current_stream(self.torch_device)
        torch.accelerator.set_stream(stream)
        try:
            yield
        finally:
            torch.accelerator.set_stream(before)
            self._module.set_device(device)

    def _register(self, tensor: Tensor) -> bool:
        if not hasattr(self._module, "cudart") or not tensor.is_contiguous():
            return False
        address = tensor.data_ptr()
        if int(self._module.cudart().cudaHostRegister(address, tensor.nbytes, 0)) != 0:
            # CUDA keeps the error for the next kernel launch: let this one have it.
            with suppress(RuntimeError):
                torch.zeros(1, device=self.torch_device)
            return False
        self._registered[address] = tensor
        return True


def _native_stream(stream: Stream) -> _AcceleratorStream:
    if not isinstance(stream, _AcceleratorStream):
        raise foreign(stream)
    return stream


def _native_event(event: Event) -> _AcceleratorEvent:
    if not isinstance(event, _AcceleratorEvent):
        raise foreign(event)
    return event
