"""Random models, orders and strategies on the simulated device: no read too early or too late."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from oracle import QUICK, Everything, assert_same, offloaded, tensors_of
from torch import Tensor, nn

from modelopt_lite.errors import OffloadError, StrategyComputeError
from modelopt_lite.offload import OffloadConfig, OffloadManager, Phase, simulate
from modelopt_lite.offload.simdevice import SimDevice
from modelopt_lite.offload.stats import TransferCurve
from modelopt_lite.offload.strategies import GreedyStrategy, NthLayerStrategy

MODES: list[dict[str, Any]] = [
    {},
    {"transfer_mode": "strategy"},
    {"profile_mode": "torch_function", "transfer_mode": "strategy"},
]
FEW = settings(deadline=None, suppress_health_check=list(HealthCheck))


class Chain(nn.Module):
    """Elementwise layers of given sizes, in an order of their own."""

    def __init__(self, sizes: list[int], calls: dict[int, int]) -> None:
        super().__init__()
        layers: Any = nn.ModuleList(Layer(size) for size in sizes)
        for caller, called in calls.items():
            layers[caller].other = [layers[called]] if caller > called else []
        self.layers: Any = layers
        self.order: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        for i in self.order:
            x = self.layers[i](x)
        return x


class Layer(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(size))
        self.bias = nn.Parameter(torch.rand(3))
        self.other: list[nn.Module] = []

    def forward(self, x: Tensor) -> Tensor:
        for other in self.other:
            x = other(x)
        return x * self.weight.mean() + self.bias


@st.composite
def cases(draw: st.DrawFn) -> dict[str, Any]:
    count = draw(st.integers(1, 6))
    some = st.lists(st.integers(0, count - 1), max_size=7)
    return {
        "sizes": draw(st.lists(st.integers(1, 700), min_size=count, max_size=count)),
        "calls": draw(st.dictionaries(*[st.integers(0, count - 1)] * 2, max_size=2)),
        "orders": draw(st.lists(some | st.just(list(range(count))), min_size=4, max_size=8)),
        "rate": draw(st.sampled_from([10.0, 1e3, 1e5])),
        "blocking": draw(st.booleans()),
        "mode": draw(st.sampled_from(MODES)),
        "strategy": draw(
            st.builds(Everything, st.integers(1, 4))
            | st.builds(
                lambda blocks, name: Everything(blocks, keep=lambda n: n.endswith(name)),
                st.integers(1, 3),
                st.sampled_from(["weight", "bias", "1.weight"]),
            )
            | st.builds(NthLayerStrategy, st.integers(1, 3))
            | st.builds(GreedyStrategy)
        ),
    }


@settings(FEW, max_examples=400)
@given(cases())
def test_every_order_gives_the_same_bits(case: dict[str, Any]) -> None:
    model = Chain(case["sizes"], case["calls"])
    x = torch.ones(3)
    device = SimDevice(
        1 << 20, curve=lambda size: size / case["rate"], host_blocks=case["blocking"]
    )
    orders = [list(range(len(case["sizes"]))), *case["orders"]]
    with torch.no_grad():
        expected = []
        for model.order in orders:
            expected.append(model(x))
        with offloaded(model, device, load_strategy=case["strategy"], **case["mode"]) as manager:
            for model.order, bits in zip(orders, expected, strict=True):
                assert_same(model(x), bits)
            assert manager.phase is Phase.INFERENCE


@settings(FEW, max_examples=80)
@given(
    st.lists(st.integers(100, 700), min_size=2, max_size=4),
    st.dictionaries(*[st.integers(0, 3)] * 2, max_size=3),
    st.floats(0.3, 1.0),
    st.sampled_from([None, NthLayerStrategy(1), GreedyStrategy()]),
    st.sampled_from(["allocation_block_transfer", "strategy"]),
)
def test_a_budget_is_kept_or_refused(
    sizes: list[int], calls: dict[int, int], part: float, strategy: Any, mode: str
) -> None:
    count = len(sizes)
    model = Chain(sizes, {a: b for a, b in calls.items() if a < count and b < count})
    model.order = list(range(count))
    total = sum(p.nbytes for p in model.parameters())
    smallest = run_within(model, int(total * part), total, strategy, mode)
    if smallest is not None:
        assert int(total * part) < smallest
        assert run_within(model, smallest, max(total, smallest), strategy, mode) is None


def run_within(
    model: Chain, budget: int, total: int, strategy: Any, mode: Any = "strategy"
) -> int | None:
    """Run a model within a budget; return the smallest one where that is refused."""
    x = torch.ones(3)
    device = SimDevice(2 * total, curve=lambda size: size / 1e3)
    with torch.no_grad():
        expected = model(x)
        manager = OffloadManager(device=device)
        manager.on_compute = lambda label: device.compute(label, 1.0)
        part = (budget + 0.5) / (2 * total)
        config = OffloadConfig(
            **QUICK, load_strategy=strategy, max_gpu_mem_fraction=part, transfer_mode=mode
        )
        manager.offload(model, config)
        try:
            for _ in range(6):
                assert_same(model(x), expected)
        except StrategyComputeError as error:
            return error.smallest_budget
        else:
            ledger = tensors_of(manager).ledger
            ledger.reset_peaks()
            device.peak = device.used
            for _ in range(3):
                assert_same(model(x), expected)
            assert ledger.peak("device") <= budget
            kept = ledger.total("device") - device.used
            assert device.peak + kept <= budget
            return None
        finally:
            device.check()
            manager.release()


def test_a_unit_in_a_unit_in_a_unit_keeps_the_budget() -> None:
    model = Chain([400, 400, 400, 400], {1: 0, 2: 1, 3: 2})
    model.order = [3, 3]
    total = sum(p.nbytes for p in model.parameters())
    smallest = run_within(model, total // 2, total, None)
    assert smallest is not None
    assert smallest >= total - 16  # all four are in at once, each in its place
    assert run_within(model, smallest, total, None) is None


def test_a_unit_that_was_not_seen_inside_of_another_cannot_exceed_the_budget() -> None:
    model, x = Chain([400, 400, 400], {}), torch.ones(3)
    model.order = [0, 1, 2]
    total = sum(p.nbytes for p in model.parameters())
    device = SimDevice(2 * total, curve=lambda size: size / 1e3)
    manager = OffloadManager(device=device)
    manager.on_compute = lambda label: device.compute(label, 1.0)
    with torch.no_grad():
        config = OffloadConfig(
            **QUICK,
            load_strategy=Everything(1),
            max_gpu_mem_fraction=(total / 2 + 0.5) / (2 * total),
        )
        manager.offload(model, config)
        for _ in range(4):
            model(x)
        assert manager.phase is Phase.INFERENCE
        layers: Any = model.layers
        layers[1].other = [layers[0]]
        with pytest.raises(OffloadError, match=r"'layers.0' runs inside of \['layers.1'\].*raise"):
            model(x)
        layers[1].other = []
        assert_same(model(x), model(x))
        device.check()
        manager.release()


@settings(FEW, max_examples=60)
@given(
    st.lists(st.integers(1, 900), min_size=1, max_size=6),
    st.integers(1, 4),
    st.sampled_from([16.0, 128.0, 1024.0]),
    st.lists(st.sampled_from([0.5, 1.0, 2.0, 3.5]), min_size=6, max_size=6),
)
def test_the_simulator_says_what_the_runtime_does(
    sizes: list[int], blocks: int, rate: float, durations: list[float]
) -> None:
    model, x = Chain(sizes, {}), torch.ones(3)
    order = [f"layers.{i}" for i in range(len(sizes))]
    model.order = list(range(len(sizes)))
    ms = dict(zip(order, durations, strict=False))
    device = SimDevice(1 << 20, curve=lambda size: size / rate)
    manager = OffloadManager(device=device)
    manager.on_compute = lambda label: device.compute(label, ms[label])
    with torch.no_grad():
        config = OffloadConfig(**QUICK, load_strategy=Everything(blocks))
        manager.offload(model, config)
        for _ in range(3):
            model(x)
        assert manager.phase is Phase.INFERENCE
        loader = tensors_of(manager).loader
        for _ in range(4):
            model(x)
        device.trace.clear()
        begin = device._compute.time
        for _ in range(2):
            model(x)
        took = (device._compute.time - begin) / 2
        spans = [(s.label, s.start, s.end) for s in device.trace if s.op == "compute"]
        stalls = stalls_of(spans, begin)
    cargos = tensors_of(manager)._cargos
    bytes_, block = {}, {}
    for label, cargo in cargos.items():
        bytes_[label], block[label] = cargo.nbytes, loader._block_of[label].index
    sharing = [b for b in block.values() if list(block.values()).count(b) > 1]
    moving = {label: b for label, b in block.items() if b in sharing}  # others stay in their block
    copied = {label: bytes_[label] for label in moving}
    events = simulate.replay(
        order, [ms[label] for label in order], copied, moving, curve=Curve(rate), passes=8
    )
    ends = [e.end_ms for e in events if e.kind == "compute" and e.label == order[-1]]
    assert abs((ends[-1] - ends[-3]) / 2 - took) < 1e-6
    spans = [(e.label, e.start_ms, e.end_ms) for e in events if e.kind == "compute"]
    replayed = stalls_of(spans[-2 * len(order) :], ends[-3])
    predicted = simulate.simulate(
        order, list(ms.values()), copied, moving, resident_bytes=0, curve=Curve(rate)
    ).stall_ms
    for label in order:
        assert abs(replayed[label] - stalls[label]) < 1e-6
        assert abs(predicted[label] - stalls[label]) < 1e-6
    assert loader.block_bytes == sum(
        max(n for m, n in bytes_.items() if block[m] == b) for b in set(block.values())
    )
    device.check()
    manager.release()


def stalls_of(computes: list[tuple[str, float, float]], end: float) -> dict[str, float]:
    """Mean ms of two passes, by label, in which nothing computes before the label does."""
    stalls: dict[str, float] = {}
    for label, start, after in computes:
        stalls[label] = stalls.get(label, 0.0) + (start - end) / 2
        end = after
    return stalls


class Curve(TransferCurve):
    """What `simulate` asks of a transfer curve."""

    def __init__(self, rate: float) -> None:
        super().__init__({1: 1 / rate})
        self.rate = rate

    def ms(self, size: float) -> float:
        return size / self.rate
