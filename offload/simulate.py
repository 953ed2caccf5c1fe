"""The event simulator: how long a pass takes when units share blocks and one bus.

The rules, for labels computed in a fixed order, pass after pass:

- A label with bytes to transfer has them copied into its block before each of its computes.
- One bus: copies run one after another, in the order of the labels, on through the passes.
- A copy starts when the bus is free and the last compute that used its block has ended.
- A compute starts when the one before has ended and its own copy is done; the wait is its *stall*.

The first label's copy may run during the pass before. Blocks are allocated once, so the peak is
what is resident plus all blocks.

Such a system is a timed event graph: every start is the maximum of two earlier times plus
constants. From any start it settles to a regime whose mean pass takes the maximum, over the
circuits of the graph, of time around the circuit over passes around it (F. Baccelli et al.,
*Synchronization and Linearity*, 1992, theorem 3.23). `simulate` computes that number exactly, by
raising a lower bound to the ratio of a circuit that exceeds it until there is none, and a schedule
that repeats itself with it. `replay` runs passes from a cold start instead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from modelopt_lite.offload.stats import TransferCurve

_EPS = 1e-12  # relative to the pass: longest paths closer than this are the same
NO_BLOCK = -1

Kind = Literal["copy", "compute"]


@dataclass(frozen=True, slots=True)
class Event:
    """One copy or compute. ``pass_index`` counts from 0; times are ms from the start of pass 0."""

    kind: Kind
    label: str
    pass_index: int
    start_ms: float
    end_ms: float
    block: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """The steady state of a plan.

    ``events`` are those of one pass: its computes from 0 on, and the copies they wait for, which
    may start before 0, in the pass before. ``bound_by`` names what a shorter pass would need less
    of: "compute", "bus" (all copies back to back) or "blocks" (copies that wait for a block).
    """

    pass_ms: float
    compute_ms: float
    stall_ms: dict[str, float]
    peak_bytes: int
    events: tuple[Event, ...]
    bound_by: Literal["compute", "bus", "blocks"]

    @property
    def total_stall_ms(self) -> float:
        """Time of a pass in which nothing computes."""
        return max(self.pass_ms - self.compute_ms, 0.0)

    @property
    def overhead(self) -> float:
        """Stall over compute time; 0.0 where nothing computes."""
        return self.total_stall_ms / self.compute_ms if self.compute_ms else 0.0


@dataclass(frozen=True, slots=True)
class Graph:
    """The timed event graph of a plan, by position in the order.

    ``copies`` are the positions that transfer, ascending; ``copy_ms`` and ``last_use`` go with
    ``copies``: the time of the copy, and the position of the last compute before it (cyclically;
    the position itself where its block serves nothing else) that used the same block.
    """

    durations: Sequence[float]
    copies: Sequence[int]
    copy_ms: Sequence[float]
    last_use: Sequence[int]


def build_graph(
    durations: Sequence[float], copy_ms: Sequence[float], blocks: Sequence[int]
) -> Graph:
    """Build the graph of a plan given by position; ``NO_BLOCK`` marks a label without transfer."""
    copies = [i for i, block in enumerate(blocks) if block != NO_BLOCK]
    newest: dict[int, int] = {blocks[i]: i for i in copies}  # the last of the pass before
    last_use: list[int] = []
    for i in copies:
        last_use.append(newest[blocks[i]])
        newest[blocks[i]] = i
    return Graph(durations, copies, [copy_ms[i] for i in copies], last_use)


class _Potentials:
    """Longest paths from one start node, with ``rate`` taken off at each pass boundary.

    Node i < n is the start of compute i, node n + j the start of the j-th copy. ``back`` is the
    node that set a value; -1 for none.
    """

    def __init__(self, graph: Graph, source: int, rate: float) -> None:
        self.graph, self.rate = graph, rate
        self.n = len(graph.durations)
        size = self.n + len(graph.copies)
        self.value = [float("-inf")] * size
        self.back = [-1] * size
        self.value[source] = 0.0
        self.eps = _EPS * (rate + 1e-300) * size

    def settle(self) -> list[int]:
        """Relax until nothing changes, or return the nodes of a circuit longer than ``rate``."""
        while self._lap():
            circuit = self._circuit()
            if circuit:
                return circuit
        return []

    def _lap(self) -> bool:
        """Visit all nodes in the order of a pass; tell whether a value rose."""
        graph, n, value, back, rate = self.graph, self.n, self.value, self.back, self.rate
        durations, copies = graph.durations, graph.copies
        changed = False
        j = 0
        for i in range(n):
            if j < len(copies) and copies[j] == i:
                node, use = n + j, graph.last_use[j]
                prior = j - 1 if j else len(copies) - 1
                by_bus = value[n + prior] + graph.copy_ms[prior] - (0.0 if j else rate)
                by_block = value[use] + durations[use] - (0.0 if use < i else rate)
                best, pred = (by_bus, n + prior) if by_bus > by_block else (by_block, use)
                if best > value[node] + self.eps:
                    value[node], back[node], changed = best, pred, True
                arrived, arrived_by = value[node] + graph.copy_ms[j], node
                j += 1
            else:
                arrived, arrived_by = float("-inf"), -1
            before = i - 1 if i else n - 1
            free = value[before] + durations[before] - (0.0 if i else rate)
            best, pred = (arrived, arrived_by) if arrived > free else (free, before)
            if best > value[i] + self.eps:
                value[i], back[i], changed = best, pred, True
        return changed

    def _circuit(self) -> list[int]:
        """Find a circuit among the ``back`` links: one exists only where going round gains."""
        state = [0] * len(self.back)
        for start in range(len(self.back)):
            node, mark = start, start + 1
            while node != -1 and not state[node]:
                state[node] = mark
                node = self.back[node]
            if node != -1 and state[node] == mark:
                circuit = [node]
                while self.back[circuit[-1]] != node:
                    circuit.append(self.back[circuit[-1]])
                return circuit[::-1]
        return []

    def ratio(self, circuit: Sequence[int]) -> float:
        """Time around a circuit over the passes around it."""
        total, passes = 0.0, 0
        graph, n = self.graph, self.n
        for node, after in zip(circuit, (*circuit[1:], circuit[0]), strict=True):
            total += graph.durations[node] if node < n else graph.copy_ms[node - n]
            if node >= n and after < n:
                continue  # a copy, and the compute that waits for it
            here = node if node < n else graph.copies[node - n]
            there = after if after < n else graph.copies[after - n]
            passes += there <= here
        return total / passes


def cycle_time(graph: Graph) -> float:
    """Return the mean time of a pass in the steady state, in ms; 0.0 without labels."""
    return _solve(graph)[0] if graph.durations else 0.0


def _solve(graph: Graph) -> tuple[float, _Potentials, Literal["compute", "bus", "blocks"]]:
    """Find the pass time, a schedule that repeats with it, and which kind of circuit sets it."""
    compute, bus = sum(graph.durations), sum(graph.copy_ms)
    rate, source = compute, 0
    bound_by: Literal["compute", "bus", "blocks"] = "compute"
    if bus > compute:
        rate, source, bound_by = bus, len(graph.durations), "bus"
    while True:
        potentials = _Potentials(graph, source, rate)
        circuit = potentials.settle()
        longer = potentials.ratio(circuit) if circuit else rate
        if longer <= rate:  # a circuit that gains nothing but rounding ends the search as well
            return rate, potentials, bound_by
        rate, source, bound_by = longer, circuit[0], "blocks"


def simulate(
    order: Sequence[str],
    durations: Sequence[float],
    transfer_bytes: Mapping[str, int],
    blocks: Mapping[str, int],
    *,
    resident_bytes: int,
    curve: TransferCurve,
    block_sizes: Mapping[int, int] | None = None,
) -> Simulation:
    """Predict the steady state of a plan.

    Args:
        order: The labels in the order in which they compute, each once.
        durations: Compute time of each, in ms.
        transfer_bytes: Bytes to copy, by label; labels that are absent or 0 transfer nothing.
        blocks: Block id, by label, of those that transfer.
        resident_bytes: Bytes that stay on the device for ever.
        curve: Time of one copy by its size.
        block_sizes: Bytes of each block; by default those of the largest of its labels.

    Returns:
        The prediction; ``stall_ms`` has an entry for every label.

    Raises:
        ValueError: Lengths differ, a label is repeated or unknown, a transfer has no block, or a
            block is smaller than one of its labels.
    """
    sizes, ids = _by_position(order, durations, transfer_bytes, blocks)
    needed = blocks_needed(sizes, ids)
    allocated = needed if block_sizes is None else dict(block_sizes)
    for block, size in needed.items():
        if allocated.get(block, 0) < size:
            raise ValueError(f"block {block} has {allocated.get(block, 0)} bytes, needs {size}")
    graph = build_graph(durations, [curve.ms(b) if b else 0.0 for b in sizes], ids)
    peak = resident_bytes + sum(allocated.values())
    if not order:
        return Simulation(
            pass_ms=0.0, compute_ms=0.0, stall_ms={}, peak_bytes=peak, events=(), bound_by="compute"
        )
    pass_ms, potentials, bound_by = _solve(graph)
    starts = [t - potentials.value[0] for t in potentials.value]
    ends = [t + d for t, d in zip(starts, durations, strict=False)]
    return Simulation(
        pass_ms=pass_ms,
        compute_ms=sum(durations),
        stall_ms={
            label: max(starts[i] - (ends[i - 1] - (0.0 if i else pass_ms)), 0.0)
            for i, label in enumerate(order)
        },
        peak_bytes=peak,
        events=_events(order, graph, ids, starts),
        bound_by=bound_by,
    )


def _events(
    order: Sequence[str], graph: Graph, ids: Sequence[int], starts: Sequence[float]
) -> tuple[Event, ...]:
    """Events of one pass from the starts of its computes and then of its copies."""
    n = len(order)
    copies = [
        Event("copy", order[i], 0, at, at + ms, ids[i])
        for i, at, ms in zip(graph.copies, starts[n:], graph.copy_ms, strict=True)
    ]
    computes = [
        Event(
            "compute", label, 0, starts[i], starts[i] + graph.durations[i], _block_or_none(ids[i])
        )
        for i, label in enumerate(order)
    ]
    return tuple(sorted([*copies, *computes], key=lambda e: (e.start_ms, e.kind, e.label)))


def replay(
    order: Sequence[str],
    durations: Sequence[float],
    transfer_bytes: Mapping[str, int],
    blocks: Mapping[str, int],
    *,
    curve: TransferCurve,
    passes: int,
) -> tuple[Event, ...]:
    """Run passes from a cold start: at 0 the bus is free and no block holds anything.

    Args and raises as `simulate`. The copies of a pass that is not run are not issued.

    Returns:
        ``passes`` computes of every label and as many copies, by start, ties copies first.
    """
    sizes, ids = _by_position(order, durations, transfer_bytes, blocks)
    bus_free, compute_free = 0.0, 0.0
    block_free: dict[int, float] = {}
    events: list[Event] = []
    for index in range(passes):
        for i, label in enumerate(order):
            ready = 0.0
            if sizes[i]:
                start = max(bus_free, block_free.get(ids[i], 0.0))
                ready = bus_free = start + curve.ms(sizes[i])
                events.append(Event("copy", label, index, start, ready, ids[i]))
            start = max(compute_free, ready)
            compute_free = start + durations[i]
            if sizes[i]:
                block_free[ids[i]] = compute_free
            events.append(
                Event("compute", label, index, start, compute_free, _block_or_none(ids[i]))
            )
    rank = {"copy": 0, "compute": 1}
    return tuple(sorted(events, key=lambda e: (e.start_ms, rank[e.kind])))


def blocks_needed(sizes: Sequence[int], ids: Sequence[int]) -> dict[int, int]:
    """Return the bytes of each block: its largest label, by position."""
    needed: dict[int, int] = {}
    for size, block in zip(sizes, ids, strict=True):
        if block != NO_BLOCK:
            needed[block] = max(needed.get(block, 0), size)
    return needed


def _block_or_none(block: int) -> int | None:
    return None if block == NO_BLOCK else block


def _by_position(
    order: Sequence[str],
    durations: Sequence[float],
    transfer_bytes: Mapping[str, int],
    blocks: Mapping[str, int],
) -> tuple[list[int], list[int]]:
    """Check a plan and return, by position, the bytes to transfer and the block ids."""
    if len(order) != len(durations):
        raise ValueError(f"{len(order)} labels but {len(durations)} durations")
    if len(set(order)) != len(order):
        twice = sorted({label for label in order if order.count(label) > 1})
        raise ValueError(f"labels are repeated in the order: {', '.join(twice)}")
    unknown = sorted(set(transfer_bytes) - set(order))
    if unknown:
        raise ValueError(f"labels that transfer but are not in the order: {', '.join(unknown)}")
    sizes = [transfer_bytes.get(label, 0) for label in order]
    homeless = [
        label for label, size in zip(order, sizes, strict=True) if size and label not in blocks
    ]
    if homeless:
        raise ValueError(f"labels that transfer but have no block: {', '.join(homeless)}")
    ids = [blocks[label] if size else NO_BLOCK for label, size in zip(order, sizes, strict=True)]
    if any(size < 0 for size in sizes) or any(i < 0 for i, s in zip(ids, sizes, strict=True) if s):
        raise ValueError("transfer bytes and block ids must not be negative")
    return sizes, ids
