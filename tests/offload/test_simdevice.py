"""The simulated device has teeth: every wait that is left out shows, as NaN or as a race."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from modelopt_lite.offload.device import Device, DeviceError, Event, HostDevice, Stream
from modelopt_lite.offload.simdevice import SimDevice, gigabytes_per_second

N = 16  # elements of a weight: 64 bytes


def weight(value: float, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.full((N,), value).to(dtype)


def recorded(device: Device, stream: Stream | None = None) -> Event:
    event = device.event(timing=True)
    device.record(event, stream)
    return event


def sim(**options: object) -> SimDevice:
    """A device of 1 ms per 64 bytes."""
    return SimDevice(10_000, curve=lambda nbytes: nbytes / 64, **options)  # type: ignore[arg-type]


def as_floats(buffer: Tensor) -> Tensor:
    return buffer.view(torch.float32)


def run_pass(
    device: SimDevice,
    weights: dict[str, Tensor],
    *,
    slots: int,
    passes: int = 2,
    wait_ready: bool = True,
    wait_used: bool = True,
    compute_ms: float = 2.0,
) -> list[float]:
    """A small offload runtime, looking ahead as far as slots allow; return what each unit read."""
    stream = device.stream()
    size = max(each.nbytes for each in weights.values())
    blocks = [device.allocate(size) for _ in range(slots)]
    used = [recorded(device) for _ in blocks]
    steps = [(step, label) for step, label in enumerate(list(weights) * passes)]
    ready: dict[int, Event] = {}
    results = []

    def prefetch(step: int) -> None:
        label, slot = steps[step][1], step % slots
        if wait_used:
            device.wait(used[slot], stream)
        device.copy(as_floats(blocks[slot])[:N], weights[label], stream, label=label)
        ready[step] = recorded(device, stream)

    for step in range(min(slots, len(steps))):
        prefetch(step)
    for step, label in steps:
        if wait_ready:
            device.wait(ready[step])
        results.append(float(as_floats(blocks[step % slots]).sum()))
        device.compute(label, compute_ms)
        device.record(used[step % slots])
        if step + slots < len(steps):
            prefetch(step + slots)
    return results


# --- a right order


@pytest.mark.parametrize("host_blocks", [False, True])
@pytest.mark.parametrize("slots", [1, 2, 3])
def test_a_right_order_reads_every_weight(slots: int, host_blocks: bool) -> None:
    weights = {f"layer{i}": weight(i + 1) for i in range(5)}
    device = sim(host_blocks=host_blocks)
    assert run_pass(device, weights, slots=slots) == [N * (i + 1.0) for i in range(5)] * 2
    device.check()
    assert device.peak == slots * 64
    copies = [span for span in device.trace if span.op == "copy"]
    assert [span.label for span in copies] == list(weights) * 2
    assert all(a.end <= b.start for a, b in pairwise(copies))
    if slots == 1:  # copy 1 ms, compute 2 ms, in turn
        assert device.now == 10 * 3
    else:  # all but the first copy is hidden
        assert device.now == 10 * 2 + 1
        assert [span[2:] for span in device.trace if span.op == "wait"] == [
            ("layer0", -1, 0, 0.0, 1.0)
        ]


def test_slow_copies_stall_the_compute_stream() -> None:
    device = SimDevice(1000, curve=gigabytes_per_second(64 / 5e6))  # 5 ms each
    run_pass(device, {"a": weight(1), "b": weight(2)}, slots=2, passes=1)
    spans = [(span.op, span.label, span.start, span.end) for span in device.trace]
    assert spans == [
        ("copy", "a", 0.0, 5.0),
        ("copy", "b", 5.0, 10.0),
        ("wait", "a", 0.0, 5.0),
        ("compute", "a", 5.0, 7.0),
        ("wait", "b", 7.0, 10.0),
        ("compute", "b", 10.0, 12.0),
    ]


def test_streams_share_one_bus() -> None:
    device = sim()
    for name in ("one", "two"):
        device.copy(device.allocate(64), weight(1), device.stream(name), label=name)
    assert [(span.start, span.end) for span in device.trace] == [(0.0, 1.0), (1.0, 2.0)]


# --- a wait left out


def test_without_the_wait_for_a_copy_a_unit_reads_nan() -> None:
    weights = {"a": weight(1), "b": weight(2)}
    device = sim()
    results = run_pass(device, weights, slots=2, wait_ready=False)
    assert all(result != result for result in results)
    with pytest.raises(DeviceError, match="'a' computes before its copy to slot 0 is done"):
        device.check()


def test_without_the_wait_for_the_last_reader_a_race_is_reported() -> None:
    weights = {"a": weight(1), "b": weight(2), "c": weight(3)}
    device = sim()
    run_pass(device, weights, slots=2, wait_used=False)
    with pytest.raises(DeviceError, match="the copy of 'c' may overwrite slot 0 in use"):
        device.check()
    blocking = sim(host_blocks=True)  # where the host itself computes, it has already waited
    run_pass(blocking, weights, slots=2, wait_used=False)
    blocking.check()


def test_a_stale_view_reads_nan_after_its_slot_was_handed_on() -> None:
    device = sim()
    stream, buffer = device.stream(), device.allocate(64)
    device.copy(buffer, weight(1), stream, label="a")
    ready = recorded(device, stream)
    device.wait(ready)
    assert as_floats(buffer).eq(1).all()
    device.copy(buffer, weight(2), stream, label="b")
    assert as_floats(buffer).isnan().all()
    device.compute("a", 1.0)
    assert device.violations == ["'a' computes after its slot 0 was handed on to 'b'"]


def test_a_copy_overtaken_before_anyone_waited_never_shows() -> None:
    device = sim()
    stream, buffer = device.stream(), device.allocate(64)
    device.copy(buffer, weight(1), stream, label="a")
    first = recorded(device, stream)
    device.copy(buffer, weight(2), stream, label="b")
    second = recorded(device, stream)
    device.wait(first)
    assert as_floats(buffer).isnan().all()
    device.wait(second)
    assert as_floats(buffer).eq(2).all()
    device.check()


def test_two_streams_race_for_a_slot() -> None:
    device = sim()
    one, two, buffer = device.stream("one"), device.stream("two"), device.allocate(64)
    device.copy(buffer, weight(1), one, label="a")
    device.copy(buffer, weight(2), two, label="b")
    assert device.violations == ["the copies of 'a' and 'b' race for slot 0"]

    device = sim()
    one, two, buffer = device.stream("one"), device.stream("two"), device.allocate(64)
    device.copy(buffer, weight(1), one, label="a")
    device.wait(recorded(device, one), two)
    device.copy(buffer, weight(2), two, label="b")
    device.wait(recorded(device, two))
    device.check()
    assert as_floats(buffer).eq(2).all()
    assert [(span.stream, span.start) for span in device.trace[:2]] == [("one", 0.0), ("two", 1.0)]


def test_a_freed_slot_reads_nan_and_takes_no_copy() -> None:
    device = sim()
    stream, buffer = device.stream(), device.allocate(64)
    device.copy(buffer, weight(1), stream, label="a")
    device.wait(recorded(device, stream))
    device.free(buffer)
    device.check()
    assert as_floats(buffer).isnan().all()
    assert (device.used, device.peak) == (0, 64)
    with pytest.raises(DeviceError, match="was freed"):
        device.copy(buffer, weight(1), stream)
    with pytest.raises(DeviceError, match="freed before"):
        device.free(buffer)
    device.compute("a", 1.0)  # resident by now
    device.check()


def test_freeing_while_a_copy_may_run_is_reported() -> None:
    device = sim()
    stream, buffer = device.stream(), device.allocate(64)
    device.copy(buffer, weight(1), stream, label="a")
    event = recorded(device, stream)
    device.free(buffer)
    assert device.violations == ["slot 0 is freed while a copy of 'a' may run"]
    device.wait(event)
    assert as_floats(buffer).isnan().all()


@pytest.mark.parametrize(
    ("dtype", "poison"),
    [
        (torch.float32, None),
        (torch.bfloat16, None),
        (torch.float16, None),
        (torch.float8_e4m3fn, None),
        (torch.float8_e5m2, None),
        (torch.float8_e4m3fnuz, None),
        (torch.float8_e5m2fnuz, None),
        (torch.float8_e8m0fnu, None),
        (torch.int8, -91),
        (torch.int32, -1515870811),
    ],
)
def test_poison_of_every_dtype(dtype: torch.dtype, poison: int | None) -> None:
    device = sim()
    stream, buffer = device.stream(), device.allocate(N * dtype.itemsize)
    view = buffer.view(dtype)
    for byte in (3, 5):
        source = torch.full((N * dtype.itemsize,), byte, dtype=torch.uint8).view(dtype)
        device.copy(view, source, stream, label=f"of {byte}")
        assert view.float().isnan().all() if poison is None else view.eq(poison).all()
        device.wait(recorded(device, stream))
        assert torch.equal(buffer, source.view(torch.uint8))
    device.free(buffer)
    assert view.float().isnan().all() if poison is None else view.eq(poison).all()


# --- several copies for one label, and several slots


def test_a_label_may_fill_its_slot_in_parts_and_have_several_slots() -> None:
    device = sim()
    stream, one, two = device.stream(), device.allocate(128), device.allocate(64)
    for index in range(2):
        device.copy(one[:64], weight(1), stream, label="a")
        device.copy(one[64:], weight(2), stream, label="a")
        device.copy(two, weight(3), stream, label="a")
        device.wait(recorded(device, stream))
        assert as_floats(one).tolist() == [1.0] * N + [2.0] * N
        assert as_floats(two).eq(3).all()
        device.compute("a", 1.0)
        device.wait(recorded(device), stream)
        assert not device.violations, index
    device.copy(one[:64], weight(1), stream, label="a")  # again: the whole slot is handed on
    assert as_floats(one).isnan().all()
    device.compute("a", 1.0)
    assert len(device.violations) == 1


def test_a_label_fetched_elsewhere_leaves_its_old_slot() -> None:
    device = sim()
    stream, one, two = device.stream(), device.allocate(64), device.allocate(64)
    device.copy(one, weight(1), stream, label="a")
    device.copy(one, weight(2), stream, label="b")
    device.copy(two, weight(1), None, label="a")  # a synchronous fetch
    assert as_floats(two).eq(1).all()
    device.compute("a", 1.0)
    device.check()


# --- memory, time, errors


def test_capacity() -> None:
    device = SimDevice(100)
    buffer = device.allocate(60)
    assert device.memory_info() == (40, 100)
    with pytest.raises(torch.OutOfMemoryError, match="60 of 100 in use"):
        device.allocate(41)
    device.free(buffer)
    device.allocate(100)
    assert device.peak == 100


def test_the_host_learns_by_polling_and_by_synchronizing() -> None:
    device = sim()
    stream, buffer = device.stream(), device.allocate(64)
    device.copy(buffer, weight(1), stream, label="a")
    event = recorded(device, stream)
    polls = 0
    while not device.query(event):
        polls += 1
    assert 900 < polls < 1100  # a millisecond in microseconds
    assert as_floats(buffer).eq(1).all()
    device.compute("a", 1.0)
    device.copy(buffer, weight(2), stream, label="b")
    assert len(device.violations) == 1
    device.compute("b", 1.0)
    device.synchronize()
    device.violations.clear()
    device.copy(buffer, weight(3), stream, label="c")
    device.check()
    assert device.trace[-1].start == device.now - 1.0


class Broken:
    def read_into(self, dst: Tensor, /) -> None:
        raise OSError("disk gone")


@pytest.mark.parametrize("make", [sim, HostDevice])
def test_failures_are_raised_as_by_the_host_device(make: Callable[[], Device]) -> None:
    device = make()
    stream, buffer = device.stream(), device.allocate(64)
    device.copy(buffer, Broken(), stream, label="a")
    bad = recorded(device, stream)
    device.copy(buffer, weight(1), stream, label="b")
    good = recorded(device, stream)
    for _ in range(2):
        with pytest.raises(OSError, match="disk gone"):
            device.wait(bad)
    device.wait(good)
    assert as_floats(buffer).eq(1).all()
    device.copy(buffer, Broken(), stream, label="a")
    with pytest.raises(OSError):
        device.synchronize()
    device.synchronize()
    with pytest.raises(OSError):
        device.copy(buffer, Broken(), None)
    device.wait(recorded(device), stream)
    device.close()
    device.close()
    with pytest.raises(DeviceError, match="closed"):
        device.copy(buffer, weight(1), stream)


@pytest.mark.parametrize("make", [sim, HostDevice])
def test_wrong_use_is_refused_as_by_the_host_device(make: Callable[[], Device]) -> None:
    device, other = make(), HostDevice() if make is sim else sim()
    with pytest.raises(DeviceError, match="never recorded"):
        device.wait(device.event())
    with pytest.raises(DeviceError, match="another device"):
        device.record(device.event(), other.stream())
    with pytest.raises(DeviceError, match="another device"):
        device.record(other.event())
    plain = device.event()
    device.record(plain)
    with pytest.raises(DeviceError, match="timing"):
        device.elapsed(plain, plain)
    with pytest.raises(DeviceError, match="at least one byte"):
        device.allocate(0)


def test_elapsed_is_virtual_time() -> None:
    device = sim()
    stream = device.stream()
    start = recorded(device)
    device.copy(device.allocate(192), torch.zeros(48), stream, label="a")
    end = recorded(device, stream)
    with pytest.raises(DeviceError, match="not done"):
        device.elapsed(start, end)
    device.synchronize(end)
    assert device.elapsed(start, end) == 3.0


# --- random orders


@settings(max_examples=150, deadline=None)
@given(
    order=st.lists(st.integers(0, 4), min_size=1, max_size=20),
    slots=st.integers(1, 4),
    left_out=st.integers(-1, 19),
    drop=st.sampled_from(["ready", "used"]),
    host_blocks=st.booleans(),
)
def test_any_order_is_right_with_all_waits_and_seen_without_one(
    order: list[int], slots: int, left_out: int, drop: str, host_blocks: bool
) -> None:
    device = sim(host_blocks=host_blocks)
    stream = device.stream()
    blocks = [device.allocate(64) for _ in range(slots)]
    used: list[Event | None] = [None] * slots
    wrong = False
    for step, value in enumerate(order):
        slot = step % slots
        before = used[slot]
        skip_used = drop == "used" and step == left_out and before is not None
        if before is not None and not skip_used:
            device.wait(before, stream)
        device.copy(blocks[slot], weight(value + 1), stream, label=str(step))
        ready = recorded(device, stream)
        skip_ready = drop == "ready" and step == left_out
        if not skip_ready:
            device.wait(ready)
        got = as_floats(blocks[slot])
        assert got.isnan().all() if skip_ready else got.eq(value + 1).all()
        device.compute(str(step), 1.0)
        used[slot] = recorded(device)
        # On a host that computes itself, the copy comes after its slot's reader anyway.
        wrong |= skip_ready or (skip_used and not host_blocks)
    assert bool(device.violations) == wrong
    for buffer in blocks:
        device.free(buffer)
    assert device.used == 0
