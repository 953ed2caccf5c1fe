"""AcceleratorDevice, against a torch whose streams are queues, and on a real accelerator.

The fake runs a stream's work only when someone waits for it, so that it is as asynchronous as can
be; "device" memory is host memory.
"""

from __future__ import annotations

import threading
import types
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from modelopt_lite.offload import accelerator as module
from modelopt_lite.offload.accelerator import AcceleratorDevice
from modelopt_lite.offload.device import DeviceError, Event, HostDevice, Stream, current_device
from modelopt_lite.offload.timeline import Timeline

SIZE = 4096


class FakeStream:
    """Work that is done in order, when it is asked for."""

    def __init__(self, device: torch.device | None = None) -> None:
        self.work: deque[Callable[[], None]] = deque()
        self.lock = threading.RLock()

    def run(self) -> None:
        with self.lock:
            while self.work:
                self.work.popleft()()


class FakeEvent:
    clock = 0.0

    def __init__(self, device: torch.device, *, enable_timing: bool = False) -> None:
        self.stream: FakeStream | None = None
        self.done = False

    def record(self, stream: FakeStream) -> None:
        def reach() -> None:
            self.done = True
            FakeEvent.clock += 1.0
            self.time = FakeEvent.clock

        self.stream = stream
        stream.work.append(reach)

    def wait(self, stream: FakeStream) -> None:
        stream.work.append(self.synchronize)

    def synchronize(self) -> None:
        assert self.stream is not None, "waited for before it was recorded"
        if not self.done:
            self.stream.run()

    def query(self) -> bool:
        return self.done

    def elapsed_time(self, end: FakeEvent) -> float:
        return end.time - self.time


class FakeTorch:
    """What torch.accelerator and torch.cuda are asked for."""

    def __init__(self) -> None:
        self.capturing = False
        self.compute = FakeStream()
        self.streams: list[FakeStream] = [self.compute]
        self.local = threading.local()
        self.pinned: list[int] = []
        self.kept: list[tuple[int, FakeStream]] = []
        self.registered: dict[int, int] = {}
        self.refuse_register = False

    def current(self, device: torch.device | None = None) -> FakeStream:
        return getattr(self.local, "stream", self.compute)

    def set_stream(self, stream: FakeStream) -> None:
        self.local.stream = stream

    def new_stream(self, device: torch.device) -> FakeStream:
        stream = FakeStream(device)
        self.streams.append(stream)
        return stream

    def synchronize(self, device: torch.device) -> None:
        for stream in self.streams:
            stream.run()

    def register(self, address: int, nbytes: int, flags: int) -> int:
        if self.refuse_register:
            return 712
        self.registered[address] = nbytes
        return 0


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeTorch:
    fake = FakeTorch()
    accelerator = {
        "current_accelerator": lambda: torch.device("cpu"),
        "is_available": lambda: True,
        "device_count": lambda: 2,
        "current_stream": fake.current,
        "set_stream": fake.set_stream,
        "synchronize": fake.synchronize,
        "get_memory_info": lambda device: (700, 1000),
    }
    for name, value in accelerator.items():
        monkeypatch.setattr(torch.accelerator, name, value)
    driver = types.SimpleNamespace(
        cudaHostRegister=fake.register, cudaHostUnregister=fake.registered.pop
    )
    cuda = types.SimpleNamespace(
        get_device_name=lambda index: f"Fake {index}",
        current_device=lambda: 0,
        set_device=lambda index: None,
        memory_reserved=lambda device: 200,
        memory_allocated=lambda device: 150,
        is_current_stream_capturing=lambda: fake.capturing,
        cudart=lambda: driver,
    )
    monkeypatch.setattr(torch, "get_device_module", lambda kind: cuda)
    monkeypatch.setattr(torch, "Stream", fake.new_stream)
    monkeypatch.setattr(torch, "Event", FakeEvent)

    copy_ = Tensor.copy_

    def lazy_copy(dst: Tensor, src: Tensor, non_blocking: bool = False) -> Tensor:
        assert non_blocking
        stream = fake.current()

        def work() -> None:
            copy_(dst, src)

        stream.work.append(work)
        return dst

    def pin_memory(tensor: Tensor) -> Tensor:
        pinned = tensor.clone()
        fake.pinned.append(pinned.data_ptr())
        return pinned

    monkeypatch.setattr(Tensor, "copy_", lazy_copy)
    monkeypatch.setattr(Tensor, "pin_memory", pin_memory)
    monkeypatch.setattr(Tensor, "is_pinned", lambda tensor: tensor.data_ptr() in fake.pinned)
    monkeypatch.setattr(
        Tensor, "record_stream", lambda tensor, s: fake.kept.append((tensor.data_ptr(), s))
    )
    return fake


@pytest.fixture
def device(fake: FakeTorch) -> Iterator[AcceleratorDevice]:
    before = set(threading.enumerate())  # devices of other tests may wait to be collected
    device = AcceleratorDevice(1)
    yield device
    device.close()
    mine = set(threading.enumerate()) - before
    assert not [each for each in mine if each.name.startswith("offload-")]


class File:
    def __init__(self, byte: int, *, gate: threading.Event | None = None) -> None:
        self.byte, self.gate = byte, gate

    def read_into(self, dst: Tensor, /) -> None:
        assert self.gate is None or self.gate.wait(10)
        if self.byte < 0:
            raise OSError("disk gone")
        dst.fill_(self.byte)


def recorded(device: AcceleratorDevice, stream: Stream | None = None) -> Event:
    event = device.event(timing=True)
    device.record(event, stream)
    return event


def full(byte: int) -> Tensor:
    return torch.full((SIZE,), byte, dtype=torch.uint8)


# --- with the fake


def test_a_copy_waits_for_the_memory_and_its_event_for_the_copy(
    fake: FakeTorch, device: AcceleratorDevice
) -> None:
    before: list[Tensor] = []  # what the copies found, when that which used the memory ran
    fake.compute.work.append(lambda: before.append(buffer.clone()))
    buffer, stream = device.allocate(SIZE), device.stream()
    buffer.zero_()
    device.copy(buffer, full(3), stream)
    ready = recorded(device, stream)
    assert not buffer.any()
    assert not device.query(ready)
    assert fake.compute.work
    device.wait(ready)
    assert not buffer.any()  # the stream waits, not the caller
    fake.streams[1].run()  # as if the copy stream were far ahead
    assert buffer.eq(3).all()
    assert not before[0].any()
    device.synchronize()
    assert device.query(ready)
    assert fake.kept == [(buffer.data_ptr(), fake.streams[1])]


def test_streams_wait_for_each_other(fake: FakeTorch, device: AcceleratorDevice) -> None:
    stream, buffer, order = device.stream(), device.allocate(SIZE), []
    fake.compute.work.append(lambda: order.append("compute"))
    used = recorded(device)
    device.wait(used, stream)
    device.copy(buffer, full(4), stream)
    fake.streams[1].work.append(lambda: order.append("copy"))
    device.synchronize(recorded(device, stream))
    assert order == ["compute", "copy"]
    device.copy(buffer[:8], full(5)[:8], None)
    assert fake.compute.work
    device.synchronize()
    assert buffer[:8].eq(5).all()


def test_disk_sources_are_read_by_a_thread_in_order_with_other_copies(
    fake: FakeTorch, device: AcceleratorDevice
) -> None:
    gate, stream = threading.Event(), device.stream()
    slots = [device.allocate(SIZE) for _ in range(4)]
    device.copy(slots[0], full(1), stream)
    events: list[Event] = []
    for byte in range(8):
        if events:
            device.wait(events[-1], stream)
        device.copy(slots[byte % 4], File(byte, gate=gate), stream)
        events.append(recorded(device, stream))
    device.copy(slots[0][:8], full(9)[:8], stream)
    last = recorded(device, stream)
    assert not device.query(last)
    gate.set()
    device.wait(events[4])
    device.wait(last)
    device.synchronize()
    assert device.query(last)
    assert slots[0][:8].eq(9).all()
    assert [int(slot[-1]) for slot in slots] == [4, 5, 6, 7]
    assert device.staging_bytes == 2 * SIZE
    assert device.elapsed(events[0], last) > 0


def test_failures_of_a_disk_source(fake: FakeTorch, device: AcceleratorDevice) -> None:
    stream, buffer = device.stream(), device.allocate(SIZE)
    device.copy(buffer, File(-1), stream, label="layers.0")
    bad = recorded(device, stream)
    device.copy(buffer, File(2), stream)
    good = recorded(device, stream)
    for _ in range(2):
        with pytest.raises(OSError, match="disk gone") as caught:
            device.wait(bad)
        assert "layers.0" in caught.value.__notes__[0]
    device.wait(good)
    device.synchronize()
    assert buffer.eq(2).all()
    with pytest.raises(OSError):
        device.copy(buffer, File(-1), None)


def test_a_disk_source_on_the_compute_stream(fake: FakeTorch, device: AcceleratorDevice) -> None:
    buffer = device.allocate(SIZE)
    for byte in (1, 2, 3):
        device.copy(buffer, File(byte), None)
    device.synchronize()
    assert buffer.eq(3).all()
    assert fake.current() is fake.compute


def test_pinning(fake: FakeTorch, device: AcceleratorDevice) -> None:
    host = full(1)
    pinned = device.pin(host)
    assert pinned.data_ptr() in fake.pinned
    assert device.pin(pinned) is pinned
    assert device.pin(host, "host_register") is host
    assert fake.registered == {host.data_ptr(): SIZE}
    fake.refuse_register = True
    other = full(2)
    with pytest.warns(RuntimeWarning, match="Fake 1: 4096 bytes .* pinned_memory_mode"):
        assert device.pin(other, "host_register").data_ptr() in fake.pinned
    with pytest.warns(RuntimeWarning, match="copies from them will block"):
        assert device.pin(other, "in_place") is other
    fake.refuse_register = False
    assert device.pin(other, "in_place") is other
    assert other.data_ptr() in fake.registered
    device.close()
    assert not fake.registered
    device.close()


def test_names_memory_and_wrong_use(fake: FakeTorch, device: AcceleratorDevice) -> None:
    assert device.name == "Fake 1"
    assert device.torch_device == torch.device("cpu", 1)
    assert device.memory_info() == (750, 1000)
    with pytest.raises(DeviceError, match=r"accelerator 2: torch sees 2"):
        AcceleratorDevice(2)
    with pytest.raises(DeviceError, match="never recorded"):
        device.wait(device.event())
    with pytest.raises(DeviceError, match="another device"):
        device.record(HostDevice().event())
    buffer = device.allocate(8)
    device.free(buffer)
    with pytest.raises(DeviceError, match="freed before"):
        device.free(buffer)
    device.close()
    with pytest.raises(DeviceError, match="closed"):
        device.copy(buffer, full(1)[:8], None)
    assert isinstance(current_device(1), AcceleratorDevice)


def test_torch_cuda_is_named_nowhere_else() -> None:
    assert module.__file__ is not None
    folder = Path(module.__file__).parent
    users = {p.name for p in folder.rglob("*.py") if "torch.cuda." in p.read_text()}
    assert users <= {"accelerator.py"}


# --- with a real one


@pytest.fixture
def real() -> Iterator[AcceleratorDevice]:
    if not torch.accelerator.is_available():
        pytest.skip("no accelerator that torch can use on this machine")
    device = AcceleratorDevice(0)
    yield device
    device.close()


@pytest.mark.gpu
def test_slots_on_an_accelerator(real: AcceleratorDevice) -> None:
    """Forty units through three slots; from pinned memory, from disk, and in place."""
    size, stream = 1 << 22, real.stream()
    sources: list[Any] = []
    for unit in range(40):
        host = torch.full((size,), float(unit)).to(torch.bfloat16)
        kinds = (real.pin(host), File(unit), real.pin(host, "host_register"))
        sources.append(kinds[unit % 3])
    timeline = Timeline(real)
    slots = [real.allocate(2 * size) for _ in range(3)]
    used, ready = [recorded(real) for _ in slots], [real.event() for _ in slots]
    timeline.begin_pass()

    def fetch(unit: int) -> None:
        real.wait(used[unit % 3], stream)
        with timeline.span("copy", str(unit), stream, slot=unit % 3, nbytes=2 * size):
            real.copy(slots[unit % 3], sources[unit], stream, label=str(unit))
        real.record(ready[unit % 3], stream)

    results = []
    for unit in range(2):
        fetch(unit)
    for unit in range(40):
        if unit + 2 < 40:
            fetch(unit + 2)
        real.wait(ready[unit % 3])
        with timeline.span("compute", str(unit)):
            slot = slots[unit % 3]
            results.append(
                (slot.max(), slot.min())
                if isinstance(sources[unit], File)
                else (slot.view(torch.bfloat16).max(), slot.view(torch.bfloat16).min())
            )
        real.record(used[unit % 3])
    timeline.end_pass()
    real.synchronize()
    assert [(int(a), int(b)) for a, b in results] == [(unit, unit) for unit in range(40)]
    (record,) = timeline.passes()
    assert len(record.spans) == 80
    assert all(span.end >= span.start for span in record.spans)


@pytest.mark.gpu
def test_an_accelerators_memory_and_errors(real: AcceleratorDevice, tmp_path: Path) -> None:
    free, total = real.memory_info()
    assert 0 < free <= total
    with pytest.raises(torch.OutOfMemoryError):
        real.allocate(total * 2)
    host = torch.zeros(1 << 20)
    assert real.pin(host, "host_register") is host
    (tmp_path / "weights").write_bytes(bytes(1 << 20))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        mapped = torch.from_numpy(np.memmap(tmp_path / "weights", np.uint8, "r"))
        pinned = real.pin(mapped, "host_register")  # CUDA refuses read-only memory
    assert pinned.is_pinned()
    assert float(torch.ones(4, device=real.torch_device).sum()) == 4.0  # and forgets its error


def test_it_knows_when_a_graph_is_captured(
    fake: FakeTorch, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = AcceleratorDevice()
    assert not device.capturing()
    fake.capturing = True
    assert device.capturing()
    other = types.SimpleNamespace()  # a kind of accelerator that has no graphs
    monkeypatch.setattr(torch, "get_device_module", lambda kind: other)
    assert not AcceleratorDevice().capturing()
