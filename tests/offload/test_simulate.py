"""The simulator against an event loop that knows nothing of graphs, and against its own rules."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modelopt_lite.offload.simulate import NO_BLOCK, Event, Simulation, replay, simulate
from modelopt_lite.offload.stats import TransferCurve

LINEAR = TransferCurve({1: 1.0, 1024: 1024.0})  # a byte takes a millisecond


class Loop:
    """The rules, step by step: at each moment start what can start, then go to the next end.

    Times are whole numbers, so that a repeated state is seen exactly.
    """

    def __init__(self, durations: list[int], copies: list[int], blocks: list[int]) -> None:
        self.durations, self.copies, self.blocks = durations, copies, blocks
        self.queue = [i for i, c in enumerate(copies) if c]
        self.now = 0
        self.copying: tuple[int, int, int] | None = None  # position, pass, end
        self.computing: tuple[int, int, int] | None = None
        self.next_copy = (0, 0)  # index in the queue, pass
        self.next_compute = (0, 0)
        self.copied: set[tuple[int, int]] = set()
        self.owner: dict[int, tuple[int, int]] = {}  # block -> the use that has not ended
        self.started: list[int] = []  # starts of the first compute of each pass
        self.log: list[tuple[str, int, int, int]] = []

    def step(self) -> None:
        while self._start():
            pass
        running = [job for job in (self.copying, self.computing) if job]
        self.now = min(end for _, _, end in running)
        if self.copying and self.copying[2] == self.now:
            self.copied.add(self.copying[:2])
            self.copying = None
        if self.computing and self.computing[2] == self.now:
            use = self.computing[:2]
            self.owner = {b: u for b, u in self.owner.items() if u != use}
            self.copied.discard(use)
            self.computing = None

    def _start(self) -> bool:
        if self.copying is None and self.queue:
            index, turn = self.next_copy
            position = self.queue[index]
            if self.blocks[position] not in self.owner:
                self.owner[self.blocks[position]] = (position, turn)
                self.copying = (position, turn, self.now + self.copies[position])
                self.log.append(("copy", position, turn, self.now))
                wrap = index + 1 == len(self.queue)
                self.next_copy = (0, turn + 1) if wrap else (index + 1, turn)
                return True
        if self.computing is None:
            position, turn = self.next_compute
            if not self.copies[position] or (position, turn) in self.copied:
                self.computing = (position, turn, self.now + self.durations[position])
                self.log.append(("compute", position, turn, self.now))
                if position == 0:
                    self.started.append(self.now)
                wrap = position + 1 == len(self.durations)
                self.next_compute = (0, turn + 1) if wrap else (position + 1, turn)
                return True
        return False

    def state(self) -> object:
        """All that the future depends on, relative to now."""
        turn = self.next_compute[1]

        def job(j: tuple[int, int, int] | None) -> object:
            return j and (j[0], j[1] - turn, j[2] - self.now)

        return (
            job(self.copying),
            job(self.computing),
            (self.next_copy[0], self.next_copy[1] - turn) if self.queue else None,
            self.next_compute[0],
            frozenset((p, t - turn) for p, t in self.copied),
            frozenset((b, p, t - turn) for b, (p, t) in self.owner.items()),
        )

    def mean_pass(self) -> Fraction:
        seen: dict[object, tuple[int, int]] = {}
        while True:
            self.step()
            at = (len(self.started), self.now)
            before = seen.setdefault(self.state(), at)
            if before[0] != at[0]:
                return Fraction(at[1] - before[1], at[0] - before[0])


@st.composite
def plans(draw: st.DrawFn) -> tuple[list[int], list[int], list[int]]:
    n = draw(st.integers(1, 7))
    durations = draw(st.lists(st.integers(1, 12), min_size=n, max_size=n))
    copies = draw(st.lists(st.integers(0, 20), min_size=n, max_size=n))
    blocks = draw(st.lists(st.integers(0, 3), min_size=n, max_size=n))
    return durations, copies, [b if c else NO_BLOCK for b, c in zip(blocks, copies, strict=True)]


def run(durations: list[int], copies: list[int], blocks: list[int]) -> Simulation:
    labels = [f"l{i}" for i in range(len(durations))]
    return simulate(
        labels,
        durations,
        dict(zip(labels, copies, strict=True)),
        {label: b for label, b in zip(labels, blocks, strict=True) if b != NO_BLOCK},
        resident_bytes=5,
        curve=LINEAR,
    )


@settings(max_examples=300, deadline=None)
@given(plans())
def test_pass_time_is_the_event_loops(plan: tuple[list[int], list[int], list[int]]) -> None:
    expected = Loop(*plan).mean_pass()
    assert run(*plan).pass_ms == pytest.approx(float(expected), rel=1e-9)


@settings(max_examples=150, deadline=None)
@given(plans(), st.integers(1, 4))
def test_replay_is_the_event_loops(
    plan: tuple[list[int], list[int], list[int]], passes: int
) -> None:
    durations, copies, blocks = plan
    loop = Loop(*plan)
    while loop.next_compute[1] < passes:
        loop.step()
    # The loop goes on to copies of a pass that replay does not run.
    expected = sorted((k, i, t, at) for k, i, t, at in loop.log if t < passes)
    labels = [f"l{i}" for i in range(len(durations))]
    events = replay(
        labels,
        durations,
        dict(zip(labels, copies, strict=True)),
        dict(zip(labels, blocks, strict=True)),
        curve=LINEAR,
        passes=passes,
    )
    got = sorted((e.kind, labels.index(e.label), e.pass_index, e.start_ms) for e in events)
    assert [g[:3] for g in got] == [e[:3] for e in expected]
    assert [g[3] for g in got] == pytest.approx([e[3] for e in expected])


@settings(max_examples=150, deadline=None)
@given(plans())
def test_schedule_keeps_the_rules_and_repeats(plan: tuple[list[int], list[int], list[int]]) -> None:
    durations, copies, blocks = plan
    result = run(*plan)
    lap = result.pass_ms

    def all_passes(kind: str) -> list[Event]:
        return [e for e in result.events if e.kind == kind]

    compute = {e.label: e for e in all_passes("compute")}
    copy = {e.label: e for e in all_passes("copy")}
    order = list(compute)
    assert order == [f"l{i}" for i in range(len(durations))]
    close = 1e-6
    for i, label in enumerate(order):
        before = compute[order[i - 1]].end_ms - (0 if i else lap)
        arrived = copy[label].end_ms if copies[i] else float("-inf")
        assert compute[label].start_ms == pytest.approx(max(before, arrived), abs=close)
        assert result.stall_ms[label] == pytest.approx(max(arrived - before, 0), abs=close)
    transfers = [label for i, label in enumerate(order) if copies[i]]
    for j, label in enumerate(transfers):
        i = order.index(label)
        bus = copy[transfers[j - 1]].end_ms - (0 if j else lap)
        users = [k for k in range(len(order)) if blocks[k] == blocks[i]]
        used = max(compute[order[k]].end_ms - (0 if k < i else lap) for k in users)
        assert copy[label].start_ms == pytest.approx(max(bus, used), abs=close)
    assert result.total_stall_ms == pytest.approx(sum(result.stall_ms.values()), abs=close)
    sizes = {b: max(c for c, k in zip(copies, blocks, strict=True) if k == b) for b in blocks}
    sizes.pop(NO_BLOCK, None)
    assert result.peak_bytes == 5 + sum(sizes.values())


@settings(max_examples=100, deadline=None)
@given(plans(), st.data())
def test_bounds_and_monotony(
    plan: tuple[list[int], list[int], list[int]], data: st.DataObject
) -> None:
    durations, copies, blocks = plan
    ms = run(*plan).pass_ms
    assert max(sum(durations), sum(copies)) - 1e-9 <= ms <= sum(durations) + sum(copies) + 1e-9
    i = data.draw(st.integers(0, len(durations) - 1))
    slower = [d + (k == i) for k, d in enumerate(durations)]
    assert run(slower, copies, blocks).pass_ms >= ms - 1e-9
    if copies[i]:
        larger = [c + (k == i) for k, c in enumerate(copies)]
        assert run(durations, larger, blocks).pass_ms >= ms - 1e-9
    alone = [i if c else NO_BLOCK for i, c in enumerate(copies)]
    rounds = [d + c for d, c in zip(durations, copies, strict=True)]
    assert run(durations, copies, alone).pass_ms == pytest.approx(
        max(sum(durations), sum(copies), *rounds)
    )


def test_one_block_cannot_overlap_and_two_can() -> None:
    serial = run([2, 2, 2, 2], [1, 1, 1, 1], [0, 0, 0, 0])
    assert (serial.pass_ms, serial.bound_by) == (12.0, "blocks")
    paired = run([2, 2, 2, 2], [1, 1, 1, 1], [0, 1, 0, 1])
    assert (paired.pass_ms, paired.bound_by, paired.total_stall_ms) == (8.0, "compute", 0.0)
    assert paired.peak_bytes == 5 + 2
    starved = run([2, 2, 2, 2], [3, 3, 3, 3], [0, 1, 0, 1])
    assert starved.bound_by == "bus"
    assert (starved.pass_ms, starved.overhead) == pytest.approx((12.0, 0.5))


def test_look_ahead_is_as_deep_as_the_blocks() -> None:
    """A copy of 6 behind computes of 2: with two blocks it waits, with four it is hidden."""
    durations, copies = [2] * 8, [1, 1, 1, 6, 1, 1, 1, 1]
    two = run(durations, copies, [0, 1] * 4).total_stall_ms
    four = run(durations, copies, [0, 1, 2, 3] * 2).total_stall_ms
    assert two > four == 0.0


def test_first_label_is_copied_in_the_pass_before() -> None:
    result = run([3, 3, 3], [2, 0, 2], [0, NO_BLOCK, 0])
    first = next(e for e in result.events if e.kind == "copy" and e.label == "l0")
    assert first.start_ms < 0
    assert result.stall_ms["l0"] == pytest.approx(2.0)


def test_near_critical_circuits_are_exact() -> None:
    """A regime that a run from cold reaches only after 20 000 passes."""
    labels = [f"l{i}" for i in range(4)]
    sizes = dict.fromkeys(labels, 1000)
    curve = TransferCurve({1000: 1.00005})
    result = simulate(
        labels,
        [1.0] * 4,
        sizes,
        {label: i for i, label in enumerate(labels)},
        resident_bytes=0,
        curve=curve,
    )
    assert result.pass_ms == pytest.approx(4.0002, rel=1e-12)


def test_no_labels_and_no_time() -> None:
    empty = simulate([], [], {}, {}, resident_bytes=3, curve=LINEAR, block_sizes={0: 4})
    assert (empty.pass_ms, empty.peak_bytes, empty.events) == (0.0, 7, ())
    idle = simulate(["a"], [0.0], {}, {}, resident_bytes=0, curve=LINEAR)
    assert (idle.pass_ms, idle.overhead) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("order", "sizes", "blocks", "block_sizes", "message"),
    [
        (["a", "a"], {}, {}, None, "repeated in the order: a"),
        (["a", "b"], {"c": 1}, {"c": 0}, None, "not in the order: c"),
        (["a", "b"], {"a": 1}, {}, None, "no block: a"),
        (["a", "b"], {"a": -1}, {"a": 0}, None, "not be negative"),
        (["a", "b"], {"a": 2}, {"a": 0}, {0: 1}, "block 0 has 1 bytes, needs 2"),
        (["a"], {}, {}, None, "1 labels but 2 durations"),
    ],
)
def test_bad_plans(
    order: list[str],
    sizes: dict[str, int],
    blocks: dict[str, int],
    block_sizes: dict[int, int] | None,
    message: str,
) -> None:
    with pytest.raises(ValueError, match=message):
        simulate(
            order,
            [1.0, 1.0],
            sizes,
            blocks,
            resident_bytes=0,
            curve=LINEAR,
            block_sizes=block_sizes,
        )
