"""Lockstep: the bits of plain forward passes, each unit brought in once for all of them."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from greenlet import GreenletExit
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from modelopt_lite.errors import InternalError
from modelopt_lite.offload import Lockstep, Unit

Build = Callable[[str], tuple[Any, list[Unit]]]
Forward = Callable[[str, Any, Tensor], Tensor]


def hook_count(model: nn.Module) -> int:
    return sum(len(module._forward_pre_hooks) for module in model.modules())


# --- models


def test_same_bits_and_each_unit_once(
    tiny: tuple[str, Any, list[Unit]], forward: Forward, poison: Any, batches: list[Tensor]
) -> None:
    name, model, units = tiny
    with torch.inference_mode():
        expected = [forward(name, model, ids) for ids in batches]
    assert all(logits.isfinite().all() for logits in expected)
    store = poison(model, units)
    lockstep = Lockstep(store.modules, enter=store.enter, leave=store.leave)
    with torch.inference_mode():
        made = lockstep.run([partial(forward, name, model, ids) for ids in batches])
    for logits, plain in zip(made, expected, strict=True):
        assert torch.equal(logits, plain)
    counts = set(lockstep.entries.values())
    if name in ("t5", "bart"):  # the embedding both halves share is one module or three
        assert counts <= {0, 1, 2}
        assert lockstep.entries.get("shared", 0) in (0, 2)
        assert all(n == 1 for unit, n in lockstep.entries.items() if "shared" not in unit)
    else:
        assert counts == ({1, 4} if name == "albert" else {1})
    assert store.log[::2] == [("enter", unit) for _, unit in store.log[::2]]
    assert store.log[1::2] == [("leave", unit) for _, unit in store.log[::2]]
    assert hook_count(model) == 0
    store.restore_all()
    with torch.inference_mode():
        assert torch.equal(forward(name, model, batches[0]), expected[0])


def test_poison_shows_a_unit_that_is_out(
    build_tiny: Build, forward: Forward, poison: Any, batches: list[Tensor]
) -> None:
    model, units = build_tiny("llama")
    poison(model, units)
    assert forward("llama", model, batches[0]).isnan().all()


# --- order


class Stack(nn.Module):
    """Layers that each pass may run in an order of its own."""

    def __init__(self, count: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(count))

    def forward(self, x: Tensor, order: list[int]) -> Tensor:
        for index in order:
            x = torch.tanh(self.layers[index](x))
        return x


def run_orders(poison: Any, orders: list[list[int]]) -> tuple[list[str], dict[str, int]]:
    """Run one pass an order, compare with plain passes, return what was brought in."""
    model = Stack()
    inputs = [torch.randn(2 + i, 8) for i in range(len(orders))]
    expected = [model(x, order) for x, order in zip(inputs, orders, strict=True)]
    units = [
        Unit(f"layers.{i}", (f"layers.{i}.weight", f"layers.{i}.bias"), True) for i in range(4)
    ]
    store = poison(model, units)
    lockstep = Lockstep(store.modules, enter=store.enter, leave=store.leave)
    made = lockstep.run([partial(model, x, o) for x, o in zip(inputs, orders, strict=True)])
    assert all(map(torch.equal, made, expected))
    entered = [unit.removeprefix("layers.") for what, unit in store.log if what == "enter"]
    return entered, lockstep.entries


def test_another_order_in_each_pass(poison: Any) -> None:
    _, entries = run_orders(poison, [[0, 1, 2, 3], [3, 2, 1, 0], [2, 0, 3, 1]])
    assert set(entries.values()) <= {1, 2, 3}
    assert sum(entries.values()) < 12  # one pass after another


@pytest.mark.parametrize(
    "orders", [[[0, 1, 2, 3], [0, 2, 3]], [[0, 2, 3], [0, 1, 2, 3]], [[3], [0, 1, 2, 3], []]]
)
def test_a_pass_that_skips_units_is_waited_for(poison: Any, orders: list[list[int]]) -> None:
    entered, _ = run_orders(poison, orders)
    assert entered == ["0", "1", "2", "3"]


def test_a_loop_that_one_pass_runs_more_often(poison: Any) -> None:
    entered, _ = run_orders(poison, [[0, 1, 0, 1, 2], [0, 1, 2]])
    assert entered == ["0", "1", "0", "1", "2"]


def test_no_pass_and_a_pass_without_units() -> None:
    lockstep = Lockstep({}, enter=pytest.fail, leave=pytest.fail)
    assert lockstep.run([]) == []
    assert lockstep.run([lambda: 3]) == [3]


def test_units_inside_others_are_part_of_them() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), nn.Linear(4, 4))
    units = {"0.1": model[0][1], "0": model[0], "1": model[1]}  # type: ignore[index]
    inside: list[str] = []
    log: list[str] = []

    def enter(name: str) -> None:
        assert not inside
        inside.append(name)
        log.append(name)

    lockstep = Lockstep(units, enter=enter, leave=inside.remove)
    x = torch.randn(2, 4)
    made = lockstep.run([partial(model, x)] * 3)
    assert all(torch.equal(y, model(x)) for y in made)
    assert log == ["0", "1"]
    assert lockstep.entries == {"0": 1, "1": 1}


# --- errors


@pytest.fixture
def stack() -> tuple[Stack, dict[str, nn.Module]]:
    model = Stack()
    return model, {f"layers.{i}": layer for i, layer in enumerate(model.layers)}


def nothing(name: str) -> None:
    """Stand for a store."""


class PassError(Exception):
    """What a pass raises in these tests."""


def test_an_error_in_one_pass_ends_the_others(stack: tuple[Stack, dict[str, nn.Module]]) -> None:
    model, units = stack
    ended: list[str] = []
    modes = torch.is_grad_enabled(), torch.get_default_dtype()

    def bystander(name: str) -> None:
        torch.set_grad_enabled(False)
        torch.set_default_dtype(torch.float64)
        try:
            model(torch.ones(1, 8, dtype=torch.float32), [0, 1, 2])
        except GreenletExit:
            ended.append(name)
            raise

    def failing() -> None:
        model(torch.ones(1, 8), [0])
        raise PassError("here")

    with pytest.raises(PassError, match="here"):
        Lockstep(units, enter=nothing, leave=nothing).run(
            [partial(bystander, "a"), failing, partial(bystander, "b")]
        )
    assert ended == ["a", "b"]
    assert (torch.is_grad_enabled(), torch.get_default_dtype()) == modes
    assert hook_count(model) == 0
    assert model(torch.ones(1, 8), [0, 1, 2, 3]).isfinite().all()


def test_what_an_ended_pass_raises_does_not_hide_the_first_error(
    stack: tuple[Stack, dict[str, nn.Module]],
) -> None:
    model, units = stack

    def stubborn() -> None:
        try:
            model(torch.ones(1, 8), [0, 1])
        finally:  # weights are gone by now
            model(torch.ones(1, 8), [2])

    def failing() -> None:
        model(torch.ones(1, 8), [0])
        raise PassError("first")

    with pytest.raises(PassError, match="first"):
        Lockstep(units, enter=nothing, leave=nothing).run([stubborn, failing, stubborn])
    assert hook_count(model) == 0
    gc.collect()  # a pass that still lived would be ended here, and complain


@pytest.mark.parametrize("what", ["enter", "leave"])
def test_an_error_of_the_store(what: str, stack: tuple[Stack, dict[str, nn.Module]]) -> None:
    model, units = stack

    def fail(name: str) -> None:
        if name == "layers.1":
            raise PassError(name)

    calls = {"enter": nothing, "leave": nothing, what: fail}
    lockstep = Lockstep(units, enter=calls["enter"], leave=calls["leave"])
    passes = [partial(model, torch.ones(1, 8), [0, 1, 2])] * 2
    with pytest.raises(PassError, match=r"layers\.1"):
        lockstep.run(passes)
    assert hook_count(model) == 0
    again = Lockstep(units, enter=nothing, leave=nothing).run(passes)
    assert torch.equal(again[0], model(torch.ones(1, 8), [0, 1, 2]))


def test_a_unit_called_outside_of_a_pass(stack: tuple[Stack, dict[str, nn.Module]]) -> None:
    model, units = stack
    model(torch.ones(1, 8), [0])  # no run, no hook

    def enter(name: str) -> None:
        model(torch.ones(1, 8), [1])

    with pytest.raises(InternalError, match=r"'layers\.1' ran outside"):
        Lockstep(units, enter=enter, leave=nothing).run([partial(model, torch.ones(1, 8), [0])])
    assert hook_count(model) == 0


@pytest.mark.parametrize("position", [0, 1, 2])
def test_inference_mode_changed_across_units(
    position: int, stack: tuple[Stack, dict[str, nn.Module]]
) -> None:
    model, units = stack

    def changing() -> None:
        with torch.inference_mode():
            model(torch.ones(1, 8), [0, 1])

    passes: list[Callable[[], Any]] = [partial(model, torch.ones(1, 8), [0, 1])] * 2
    passes.insert(position, changing)
    with pytest.raises(InternalError, match="inference mode"):
        Lockstep(units, enter=nothing, leave=nothing).run(passes)
    assert not torch.is_inference_mode_enabled()
    assert hook_count(model) == 0


# --- torch's modes


class Moody(nn.Module):
    """Runs its layers under a mode that is entered before the first and left before the last."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor, mode: Callable[[], Any], steps: int) -> tuple[Tensor, list[Any]]:
        seen: list[Any] = []

        def step(index: int) -> None:
            nonlocal x
            x = self.layers[index](x.float())
            seen.append((x.dtype, x.requires_grad, torch.get_default_dtype(), torch.ones(1).dtype))

        with mode():
            step(0)
            step(1)
        for _ in range(steps):
            step(2)
        return x, seen


class Doubles(TorchFunctionMode):
    """Doubles what a linear layer gives."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        return 2 * result if getattr(func, "__name__", "") == "linear" else result


class DefaultDouble:
    """torch.float64 as the default dtype."""

    def __enter__(self) -> None:
        torch.set_default_dtype(torch.float64)

    def __exit__(self, *error: object) -> None:
        torch.set_default_dtype(torch.float32)


MODES: list[Callable[[], Any]] = [
    torch.no_grad,
    torch.enable_grad,
    partial(torch.autocast, "cpu", dtype=torch.bfloat16),
    partial(torch.autocast, "cpu", dtype=torch.float16),
    Doubles,
    DefaultDouble,
    partial(torch.device, "cpu"),
]


@pytest.mark.parametrize("outer", [torch.enable_grad, torch.no_grad, Doubles])
def test_modes_follow_their_pass(outer: Callable[[], Any]) -> None:
    model = Moody()
    x = torch.randn(2, 8)
    units = {f"layers.{i}": layer for i, layer in enumerate(model.layers)}
    # Interleaved: passes leave their modes in the order in which they entered them.
    cases = [(mode, steps) for steps in (1, 2) for mode in MODES]
    with outer():
        expected = [model(x, mode, steps) for mode, steps in cases]
        passes = [partial(model, x, mode, steps) for mode, steps in cases]
        made = Lockstep(units, enter=nothing, leave=nothing).run(passes)
        grad, stack = torch.is_grad_enabled(), torch.overrides._get_current_function_mode_stack()
    for (y, seen), (plain, plainly_seen) in zip(made, expected, strict=True):
        assert torch.equal(y, plain)
        assert seen == plainly_seen
    assert grad == (outer is not torch.no_grad)
    assert len(stack) == (outer is Doubles)
    assert not torch.overrides._get_current_function_mode_stack()
    assert not torch.is_autocast_enabled("cpu")
    assert torch.get_default_dtype() == torch.float32
    assert torch.is_grad_enabled()


def test_the_stores_calls_run_under_the_callers_modes() -> None:
    model = Moody()
    units = {f"layers.{i}": layer for i, layer in enumerate(model.layers)}
    seen: list[tuple[bool, bool]] = []

    def note(name: str) -> None:
        seen.append((torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")))

    passes = [partial(model, torch.randn(2, 8), mode, 1) for mode in MODES]
    Lockstep(units, enter=note, leave=note).run(passes)
    assert seen == [(True, False)] * 6
