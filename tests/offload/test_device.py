"""The host as a device: copies on a thread, in order; nothing that fails there is lost."""

from __future__ import annotations

import gc
import mmap
import threading
import time
import traceback
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from modelopt_lite.offload.copythread import CopyThread, Mark
from modelopt_lite.offload.device import (
    DeviceError,
    DiskSource,
    Event,
    HostDevice,
    Stream,
    current_device,
)
from modelopt_lite.offload.hostmemory import host_memory
from modelopt_lite.offload.simdevice import SimDevice


class File:
    """A disk source; ``gate`` holds it back, ``error`` makes it fail."""

    def __init__(
        self,
        byte: int,
        *,
        gate: threading.Event | None = None,
        error: BaseException | None = None,
    ) -> None:
        self.byte, self.gate, self.error = byte, gate, error
        self.thread = ""
        self.begun = threading.Event()

    def read_into(self, dst: Tensor, /) -> None:
        self.thread = threading.current_thread().name
        self.begun.set()
        assert dst.dtype == torch.uint8
        assert dst.ndim == 1
        if self.gate is not None:
            assert self.gate.wait(10)
        if self.error is not None:
            raise self.error
        dst.fill_(self.byte)


_others: set[threading.Thread] = set()


@pytest.fixture(autouse=True)
def only_threads_of_this_test() -> None:
    """A device of another test may still wait to be collected: its thread is not looked at."""
    _others.clear()
    _others.update(threading.enumerate())


def copy_threads() -> list[threading.Thread]:
    return [
        each
        for each in threading.enumerate()
        if each.name.startswith("offload-") and each not in _others
    ]


@pytest.fixture
def host() -> Iterator[HostDevice]:
    before = len(copy_threads())
    device = HostDevice()
    yield device
    device.close()
    assert len(copy_threads()) == before


def recorded(device: HostDevice, stream: Stream | None = None) -> Event:
    event = device.event(timing=True)
    device.record(event, stream)
    return event


# --- copies


def test_a_copy_returns_at_once_and_is_there_after_the_wait(host: HostDevice) -> None:
    gate = threading.Event()
    buffer, stream, source = host.allocate(64), host.stream(), File(7, gate=gate)
    buffer.zero_()
    host.copy(buffer, source, stream)
    event = recorded(host, stream)
    assert not host.query(event)
    assert not buffer.any()
    gate.set()
    host.wait(event)
    assert host.query(event)
    assert buffer.eq(7).all()
    assert source.thread == "offload-copy"
    assert isinstance(source, DiskSource)


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.int8, torch.bool]
)
def test_bytes_are_kept_whatever_the_dtype(host: HostDevice, dtype: torch.dtype) -> None:
    source = torch.randint(0, 2, (6, 4)).to(dtype)
    buffer, stream = host.allocate(source.nbytes + 16), host.stream()
    host.copy(buffer[16:], source, stream)
    host.wait(recorded(host, stream))
    assert torch.equal(buffer[16:].view(dtype).view(6, 4).float(), source.float())
    view = buffer[16:].view(dtype).view(6, 4)
    view.zero_()
    host.copy(view, torch.nn.Parameter(source, requires_grad=source.is_floating_point()), None)
    assert torch.equal(view.float(), source.float())


def test_a_scalar_and_an_empty_tensor_can_be_copied(host: HostDevice) -> None:
    buffer = host.allocate(4)
    host.copy(buffer.view(torch.float32)[0], torch.tensor(1.5), None)
    assert buffer.view(torch.float32).item() == 1.5
    host.copy(buffer[:0], torch.empty(0), host.stream())
    host.synchronize()


def test_buffers_of_inference_mode_can_be_filled_outside_of_it(host: HostDevice) -> None:
    with torch.inference_mode():
        buffer = host.allocate(4)
    buffer.fill_(1)
    host.copy(buffer, torch.full((4,), 2, dtype=torch.uint8), None)
    assert buffer.eq(2).all()
    with torch.device("meta"):
        assert host.allocate(4).device.type == "cpu"


@settings(max_examples=30, deadline=None)
@given(
    jobs=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 255)), min_size=1, max_size=60),
    streams=st.integers(1, 3),
)
def test_many_copies_into_few_slots_arrive_in_order(
    jobs: list[tuple[int, int]], streams: int
) -> None:
    device = HostDevice()
    slots = [device.allocate(32) for _ in range(4)]
    queues = [device.stream() for _ in range(streams)]
    held: dict[int, tuple[int, Event]] = {}
    for index, (slot, byte) in enumerate(jobs):
        if slot in held:  # the slot's last copy is waited for before it is read and handed on
            device.wait(held[slot][1])
            assert slots[slot].eq(held[slot][0]).all()
        stream = queues[index % streams]
        device.copy(slots[slot], torch.full((32,), byte, dtype=torch.uint8), stream)
        held[slot] = (byte, recorded(device, stream))
    device.synchronize()
    for slot, (byte, event) in held.items():
        assert device.query(event)
        assert slots[slot].eq(byte).all()
    device.close()


def test_ten_thousand_copies_with_failures_between_them(host: HostDevice) -> None:
    buffer, stream = host.allocate(8), host.stream()
    failed = 0
    for index in range(10_000):
        bad = index % 97 == 5
        host.copy(buffer, File(index % 256, error=OSError(index) if bad else None), stream)
        event = recorded(host, stream)
        if bad:
            with pytest.raises(OSError, match=str(index)):
                host.wait(event)
            failed += 1
        elif index % 10 == 0:
            host.wait(event)
            assert buffer[0] == index % 256
    assert failed == 104
    host.synchronize()


def test_the_caller_computes_while_a_copy_reads(host: HostDevice) -> None:
    half_read, computed = threading.Event(), threading.Event()

    class Slow:
        def read_into(self, dst: Tensor, /) -> None:
            half_read.set()
            assert computed.wait(10)  # never, were the caller held up
            dst.fill_(3)

    buffer, stream = host.allocate(8), host.stream()
    host.copy(buffer, Slow(), stream)
    assert half_read.wait(10)
    torch.ones(16, 16) @ torch.ones(16, 16)
    computed.set()
    host.wait(recorded(host, stream))
    assert buffer.eq(3).all()


# --- failures


def test_a_failure_is_raised_at_the_wait_with_its_own_traceback(host: HostDevice) -> None:
    buffer, stream = host.allocate(8), host.stream()
    host.copy(buffer, File(0, error=OSError("disk gone")), stream, label="layers.3")
    event = recorded(host, stream)
    for _ in range(2):
        with pytest.raises(OSError, match="disk gone") as caught:
            host.wait(event)
        frames = traceback.extract_tb(caught.value.__traceback__)
        assert [frame.name for frame in frames].count("read_into") == 1
        assert caught.value.__notes__ == ["while the weights of 'layers.3' were brought in"]
    with pytest.raises(OSError):
        host.synchronize(event)


def test_the_copies_after_a_failure_are_good_once_it_was_seen(host: HostDevice) -> None:
    buffer, stream = host.allocate(8), host.stream()
    host.copy(buffer, File(0, error=OSError("once")), stream)
    first = recorded(host, stream)
    host.copy(buffer, File(9), stream)
    second = recorded(host, stream)
    with pytest.raises(OSError):
        host.wait(first)
    host.wait(second)
    assert buffer.eq(9).all()
    host.synchronize()


def test_a_failure_that_nobody_waited_for_shows_at_the_next_wait(host: HostDevice) -> None:
    buffer, stream = host.allocate(8), host.stream()
    host.copy(buffer, File(0, error=OSError("unseen")), stream)
    recorded(host, stream)
    host.copy(buffer, File(9), stream)
    later = recorded(host, stream)
    with pytest.raises(OSError, match="unseen"):
        host.wait(later)
    host.wait(later)


def test_a_failure_is_not_raised_by_what_came_before_it(host: HostDevice) -> None:
    buffer, stream = host.allocate(8), host.stream()
    host.copy(buffer, File(4), stream)
    before = recorded(host, stream)
    host.copy(buffer, File(0, error=OSError("later")), stream)
    after = recorded(host, stream)
    while not host.query(after):
        time.sleep(0.001)
    host.wait(before)
    with pytest.raises(OSError, match="later"):
        host.wait(after)


def test_one_failure_of_several_copies_spoils_their_common_event(host: HostDevice) -> None:
    buffer, stream = host.allocate(16), host.stream()
    host.copy(buffer[:8], File(0, error=KeyboardInterrupt()), stream)
    host.copy(buffer[8:], File(1), stream)
    events = [recorded(host, stream), recorded(host, stream)]  # as a timeline records its own
    for event in events * 2:
        with pytest.raises(KeyboardInterrupt):
            host.wait(event)


def test_a_failure_on_the_compute_stream_is_raised_there(host: HostDevice) -> None:
    with pytest.raises(OSError, match="now"):
        host.copy(host.allocate(8), File(0, error=OSError("now")), None)
    host.synchronize()


# --- events


def test_time_between_events(host: HostDevice) -> None:
    stream, gate = host.stream(), threading.Event()
    start = recorded(host)
    host.copy(host.allocate(8), File(0, gate=gate), stream)
    end = recorded(host, stream)
    with pytest.raises(DeviceError, match="not done"):
        host.elapsed(start, end)
    time.sleep(0.02)
    gate.set()
    host.synchronize(end)
    assert 15 < host.elapsed(start, end) < 5000


def test_an_event_recorded_again_keeps_the_last_time(host: HostDevice) -> None:
    stream = host.stream()
    event = host.event(timing=True)
    host.record(event, stream)
    start = recorded(host)
    time.sleep(0.01)
    host.record(event, stream)
    host.synchronize(event)
    assert host.elapsed(start, event) > 5


def test_an_event_that_moved_on_takes_no_time_from_where_it_was(host: HostDevice) -> None:
    stream, gate, event = host.stream(), threading.Event(), host.event(timing=True)
    host.copy(host.allocate(8), File(0, gate=gate), stream)
    host.record(event, stream)
    begin = time.perf_counter()
    start = recorded(host)
    host.record(event)
    between = time.perf_counter() - begin
    gate.set()
    host.synchronize()
    assert host.elapsed(start, event) <= between * 1e3


def test_wrong_use_of_events_and_streams(host: HostDevice) -> None:
    other = SimDevice(100)
    for use in (host.wait, host.query, host.synchronize):
        with pytest.raises(DeviceError, match="never recorded"):
            use(host.event())
        with pytest.raises(DeviceError, match="another device"):
            use(other.event())
    with pytest.raises(DeviceError, match="another device"):
        host.record(host.event(), other.stream())
    plain = host.event()
    host.record(plain)
    with pytest.raises(DeviceError, match="timing=True"):
        host.elapsed(plain, plain)


# --- memory


def test_capacity_and_memory_info() -> None:
    device = HostDevice(capacity=100)
    first = device.allocate(60)
    assert device.memory_info() == (40, 100)
    with pytest.raises(torch.OutOfMemoryError, match="41 bytes asked for, 60 of 100 in use"):
        device.allocate(41)
    device.free(first)
    assert device.memory_info() == (100, 100)
    with pytest.raises(DeviceError, match="freed before"):
        device.free(first)
    with pytest.raises(DeviceError, match="0 bytes"):
        device.allocate(0)
    free, total = HostDevice().memory_info()
    assert 0 < free <= total


def test_memory_of_a_control_group(tmp_path: Path) -> None:
    group = tmp_path / "sys/fs/cgroup/jobs/one"
    group.mkdir(parents=True)
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/jobs/one\n")
    (tmp_path / "proc/meminfo").write_text("MemTotal: 9 kB\nMemAvailable:  2000 kB\n")
    assert host_memory(tmp_path)[0] == 2000 * 1024
    (group / "memory.max").write_text("1000000\n")
    (group / "memory.current").write_text("700000\n")
    (group / "memory.stat").write_text("anon 400000\ninactive_file 250000\n")
    assert host_memory(tmp_path) == (550_000, 1_000_000)
    (group.parent / "memory.max").write_text("max\n")
    assert host_memory(tmp_path) == (550_000, 1_000_000)
    (group.parent / "memory.max").write_text("500000\n")
    (group.parent / "memory.current").write_text("800000\n")
    assert host_memory(tmp_path) == (0, 500_000)
    assert host_memory(tmp_path / "nowhere")[0] == host_memory(tmp_path / "nowhere")[1]


def test_memory_of_a_control_group_of_version_1(tmp_path: Path) -> None:
    top = tmp_path / "sys/fs/cgroup/memory"
    group = top / "jobs/one"
    group.mkdir(parents=True)
    (tmp_path / "proc/self").mkdir(parents=True)
    lines = "5:cpu,cpuacct:/other\n4:hugetlb,memory:/jobs/one\n1:name=systemd:/\n0::/\n"
    (tmp_path / "proc/self/cgroup").write_text(lines)
    (tmp_path / "proc/meminfo").write_text("MemAvailable:  2000 kB\n")
    (group / "memory.limit_in_bytes").write_text("9223372036854771712\n")  # none
    (group / "memory.usage_in_bytes").write_text("700000\n")
    (group / "memory.stat").write_text("inactive_file 1\ntotal_inactive_file 250000\n")
    free, total = host_memory(tmp_path)
    assert free == 2000 * 1024
    assert total > free
    (group / "memory.limit_in_bytes").write_text("1000000\n")
    assert host_memory(tmp_path) == (550_000, 1_000_000)
    (top / "memory.limit_in_bytes").write_text("500000\n")
    (top / "memory.usage_in_bytes").write_text("400000\n")
    assert host_memory(tmp_path) == (100_000, 500_000)
    # In a container: the name is that outside, and the top is the container's own group.
    (tmp_path / "proc/self/cgroup").write_text("4:memory:/elsewhere/container\n")
    assert host_memory(tmp_path) == (100_000, 500_000)


def test_copies_that_cannot_be_are_refused(host: HostDevice) -> None:
    buffer = host.allocate(16)
    with pytest.raises(DeviceError, match="8 bytes into 16"):
        host.copy(buffer, torch.zeros(2), None)
    with pytest.raises(DeviceError, match="strides"):
        host.copy(buffer[::2], torch.zeros(2), None)
    with pytest.raises(DeviceError, match="strides"):
        host.copy(buffer, torch.zeros(8, 2, dtype=torch.uint8).T, None)
    with pytest.raises(DeviceError, match="on meta"):
        host.copy(buffer, torch.zeros(4, device="meta"), None)


# --- the end


def test_closing_twice_drops_what_is_queued_and_ends_the_thread() -> None:
    device, gate = HostDevice(), threading.Event()
    buffer, stream = device.allocate(8), device.stream()
    buffer.zero_()
    under_way = File(1, gate=gate)
    device.copy(buffer, under_way, stream)
    dropped = File(2)
    gone = weakref.ref(dropped)
    device.copy(buffer, dropped, stream)
    del dropped
    event = recorded(device, stream)
    assert under_way.begun.wait(10)
    threading.Timer(0.05, gate.set).start()
    device.close()
    device.close()
    assert buffer.eq(1).all()  # the copy under way was finished, the next one dropped
    assert gone() is None
    assert not copy_threads()
    for use in (device.wait, device.synchronize):
        with pytest.raises(DeviceError, match="closed"):
            use(event)
    for where in (stream, None):
        with pytest.raises(DeviceError, match="closed"):
            device.copy(buffer, File(0), where)


def test_a_waiter_is_woken_when_the_device_closes() -> None:
    device, gate = HostDevice(), threading.Event()
    stream, seen = device.stream(), []
    device.copy(device.allocate(8), File(1, gate=gate), stream)
    device.copy(device.allocate(8), File(1), stream)
    event = recorded(device, stream)

    def wait() -> None:
        try:
            device.wait(event)
        except DeviceError as error:
            seen.append(error)

    waiter = threading.Thread(target=wait)
    waiter.start()
    closer = threading.Thread(target=device.close)
    closer.start()
    while not device._thread.closed:
        time.sleep(0.001)
    gate.set()
    for thread in (waiter, closer):
        thread.join(10)
        assert not thread.is_alive()
    assert len(seen) == 1


def test_a_forgotten_device_ends_its_thread_and_keeps_nothing() -> None:
    device = HostDevice()
    stream = device.stream()
    source = torch.zeros(8, dtype=torch.uint8)
    gone = weakref.ref(source)
    device.copy(device.allocate(8), source, stream)
    device.synchronize()
    (thread,) = copy_threads()
    del source
    for _ in range(100):  # the thread lets go just after it says that it is done
        gc.collect()
        if gone() is None:
            break
        time.sleep(0.01)
    assert gone() is None
    del device, stream
    gc.collect()
    thread.join(10)
    assert not thread.is_alive()


def test_a_thread_can_be_closed_from_itself() -> None:
    thread = CopyThread("offload-self")
    thread.submit(0, thread.close)
    for _ in range(200):
        if not copy_threads():
            break
        time.sleep(0.01)
    assert not copy_threads()
    thread.wait(Mark(1))  # it was done
    with pytest.raises(DeviceError, match="offload-self: closed"):
        thread.wait(Mark(2))


def test_a_machine_without_accelerator_gets_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in (None, torch.device("mps")):
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda k=kind: k)
        device = current_device(3, host_capacity=1000)
        assert isinstance(device, HostDevice)
        assert device.capacity == 1000
        pinned = torch.zeros(2)
        assert device.pin(pinned, "host_register") is pinned
        assert device.name.startswith("host ")


@pytest.mark.parametrize("nbytes", [1, 5000, 1 << 21, (5 << 20) + 3])
def test_a_host_buffer_begins_at_a_page(nbytes: int) -> None:
    device = HostDevice()
    with torch.inference_mode():
        buffer = device.allocate(nbytes)
    page = 1 << 21 if nbytes >= 1 << 21 else mmap.PAGESIZE
    assert buffer.data_ptr() % page == 0
    assert (buffer.shape, buffer.dtype) == ((nbytes,), torch.uint8)
    assert not buffer.is_inference()
    buffer.fill_(7)
    assert int(buffer.sum(dtype=torch.int64)) == 7 * nbytes
    assert device.used == nbytes
    device.free(buffer)
    assert device.used == 0
