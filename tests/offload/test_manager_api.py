"""Names that users know: manual blocks, replans, compiled units, and the examples of the seeds."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from oracle import QUICK, Everything, Stack, assert_same, offloaded, tensors_of
from torch import Tensor, nn

import modelopt_lite.offload as flextensor
from modelopt_lite.errors import OffloadError
from modelopt_lite.offload import HostDevice, OffloadConfig, OffloadManager, Phase, api
from modelopt_lite.offload.discovery import common_prefix, match_prefixes
from modelopt_lite.offload.simdevice import SimDevice
from modelopt_lite.offload.strategies import StrictRoundRobinAssignment
from modelopt_lite.offload.tensors import TensorManager

IDS = torch.arange(10).view(2, 5)


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch.manual_seed(0)
    yield
    for manager in api._managers.values():
        manager.release()
    api._managers.clear()


class Manual(nn.Module):
    """Layers that the caller runs; a forward that runs them, too."""

    def __init__(self) -> None:
        super().__init__()
        for i in range(4):
            setattr(self, f"layer_{i}", nn.Linear(8, 8))
        self.head = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        for i in range(4):
            x = getattr(self, f"layer_{i}")(x)
        y: Tensor = self.head(x)
        return y


def run_blocks(manager: OffloadManager, model: Manual, x: Tensor) -> Tensor:
    for i in range(4):
        with manager.offload_block(f"block {i}"):
            x = getattr(model, f"layer_{i}")(x)
    y: Tensor = model.head(x)
    return y


@pytest.mark.parametrize("indirect", [False, True])
def test_manual_blocks(indirect: bool) -> None:
    model, x = Manual(), torch.rand(2, 8)
    fields = {"profile_mode": "torch_function", "transfer_mode": "strategy"} if indirect else {}
    with torch.no_grad():
        before = model(x)
        with offloaded(model, include_patterns=[], load_strategy=Everything(), **fields) as manager:
            assert manager.offload_units() == ()
            for _ in range(6):
                assert_same(run_blocks(manager, model, x), before)
                manager.update_state()
            assert manager.phase is Phase.INFERENCE
            tensors = tensors_of(manager)
            assert {m.name for m in tensors._cargos["block 1"].tensors} == {
                "layer_1.weight",
                "layer_1.bias",
            }
            assert tensors.resident_bytes == (64 + 8) * 4  # the head ran in no block
            assert tensors.loader.counts.misses <= 1


def test_what_two_blocks_read_stays() -> None:
    model: Any = Manual()
    x = torch.rand(2, 8)
    model.layer_3.weight = model.layer_0.weight
    with torch.no_grad():
        before = model(x)
        with offloaded(model, include_patterns=[], load_strategy=Everything()) as manager:
            for _ in range(6):
                assert_same(run_blocks(manager, model, x), before)
                manager.update_state()
            names = {m.name for c in tensors_of(manager)._cargos.values() for m in c.tensors}
            assert "layer_0.weight" not in names
            assert "layer_0.bias" in names


def test_prefixes_give_the_rest_to_a_block() -> None:
    names = ["layers.0.attn.q.weight", "layers.0.attn.k.weight", "layers.0.ffn.w1.weight"]
    assert common_prefix(names) == "layers.0"
    assert match_prefixes({"0": names}, ["layers.0.attn.q.scale", "layers.1.x", "layers.01.y"]) == {
        "layers.0.attn.q.scale": "0"
    }

    class Rest(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Stack(2).layers)
            for layer in self.layers:
                layer.extra = nn.Parameter(torch.rand(16))

        def forward(self, x: Tensor) -> Tensor:
            return x

    for discover in (True, False):
        model: Any = Rest()
        manager = OffloadManager(device=HostDevice())
        manager.offload(model, OffloadConfig(**QUICK, include_patterns=[]))
        tensors_of(manager)._discover_untraced = discover
        with torch.no_grad():
            for i, layer in enumerate(model.layers):
                with manager.offload_block(f"b{i}"):
                    layer.down(layer.up(layer.norm(torch.rand(2, 16))))
        manager.update_state()
        found = {m.name for m in tensors_of(manager)._by_label["b1"]}
        assert ("layers.1.extra" in found) is discover
        manager.release()


def test_a_gap_has_no_tensors_and_is_timed() -> None:
    model = Stack(3)
    with offloaded(model, exclude_patterns=["layers.1.*"], load_strategy=Everything()) as manager:
        for _ in range(5):
            model(IDS)
        layers = tensors_of(manager).layer_statistics_collector.get_layer_stats()
        gap = next(layer for layer in layers if layer.label == "layers.1")
        assert gap.tensors == ()
        assert gap.duration > 0
        assert "layers.1" in tensors_of(manager).loader._position


def test_skip_discovery_and_its_fallback(caplog: pytest.LogCaptureFixture) -> None:
    model: Any = Manual()
    with offloaded(model, skip_discovery=True, load_strategy=Everything()) as manager:
        assert manager.phase is Phase.PROFILING
        assert manager.skip_discovery_honored is True
        assert manager.iters_before_inference == 2
        with pytest.raises(RuntimeError, match="skip_discovery=False"), manager.offload_block("b"):
            pass
        model(torch.rand(2, 8))
        assert manager.iters_before_inference == 1
    with caplog.at_level(logging.WARNING):
        with offloaded(model, skip_discovery=True, include_patterns=[]) as manager:
            assert manager.phase is Phase.DISCOVERY
            assert manager.skip_discovery_honored is False
            with manager.offload_block("b"):
                model.layer_0(torch.rand(2, 8))
    assert "discovering" in caplog.text
    with offloaded(model) as manager:
        assert manager.skip_discovery_honored is True
        assert manager.iters_before_inference == 3
    assert manager.skip_discovery_honored is None


def test_profiling_is_suspended_and_resumed() -> None:
    model = Stack(3)
    with offloaded(model, load_strategy=Everything()) as manager:
        model(IDS)
        manager.suspend_profiling()
        with manager.pause_profiling():
            for _ in range(5):
                model(IDS)
        assert manager.phase.name == "PROFILING"
        assert not any(tensors_of(manager).layer_statistics_collector.samples()["layers.0"])
        manager.resume_profiling()
        with pytest.raises(OffloadError, match="resume_profiling"):
            manager.resume_profiling()
        model(IDS)
        assert len(tensors_of(manager).layer_statistics_collector.samples()["layers.0"]) == 1
        manager.clear_profiling_durations()
        assert not tensors_of(manager).layer_statistics_collector.samples()["layers.0"]
        model(IDS)
        assert manager.phase is Phase.INFERENCE
    for call in (manager.suspend_profiling, manager.clear_profiling_durations):
        with pytest.raises(RuntimeError, match="offload"):
            call()


def test_replans() -> None:
    model, device = Stack(4), SimDevice(1 << 20)
    with torch.no_grad():
        before = model(IDS)
        with offloaded(model, device, load_strategy=Everything()) as manager:
            assert manager.request_strategy_replan() == 0
            assert not manager.strategy_replan_status.can_request
            for _ in range(3):
                model(IDS)
            assert manager.strategy_replan_status == flextensor.StrategyReplanStatus(
                "idle", True, None
            )
            for manual in (False, True):
                manager.on_compute = lambda label: device.compute(label, 7.0)
                passes = manager.request_strategy_replan(manual_update_state=manual)
                assert passes == 5
                assert manager.request_strategy_replan() == 0
                assert manager.strategy_replan_status.state == "in_progress"
                old = tensors_of(manager).loader
                for _ in range(passes):
                    assert_same(model(IDS), before)
                    if manual:
                        manager.update_state()
                assert tensors_of(manager).loader is not old
                assert manager.strategy_replan_status.applied is True
                stats = tensors_of(manager).layer_statistics_collector.get_layer_stats()
                assert {round(layer.duration, 3) for layer in stats} == {7.0}
                assert_same(model(IDS), before)


def test_a_config_changes_only_where_it_can() -> None:
    model = Stack(2)
    with offloaded(model, load_strategy=Everything()) as manager:
        with pytest.raises(OffloadError, match="skip_discovery"):
            manager.set_config(manager.config.model_copy(update={"skip_discovery": True}))
        with pytest.warns(UserWarning, match="num_blocks"):
            manager.set_config(manager.config.model_copy(update={"num_blocks": 6}))
        manager.set_config(manager.config.model_copy(update={"profiling_iters": 1}))
        assert manager.eager_profiling_iters == 1
    flextensor.init(OffloadConfig(num_blocks=5))
    assert flextensor.get_offload_manager().config.num_blocks == 5
    flextensor.set_config(OffloadConfig())
    assert flextensor.get_offload_manager().config.num_blocks == 4


def test_compiled_units() -> None:
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> object:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    model = Stack(3)
    hooks = []
    model.layers[1].register_forward_hook(lambda *_: hooks.append(1))
    manager = OffloadManager(device=SimDevice(1 << 20))
    with torch.no_grad():
        before = model(IDS)
        manager.offload(
            model,
            OffloadConfig(**QUICK, include_patterns=["layers.*"], load_strategy=Everything()),
            compile_fn=lambda unit: torch.compile(unit, backend=backend, fullgraph=True),
        )
        for _ in range(6):
            assert_same(model(IDS), before)
        assert graphs
        assert len(hooks) == 7
        manager.release()
        assert_same(model(IDS), before)
        torch._dynamo.reset()
        graphs.clear()
        manager.offload(
            model, OffloadConfig(**QUICK, external_compile=True, load_strategy=Everything())
        )
        for _ in range(3):
            model(IDS)
        for layer in model.layers:
            layer.compile(backend=backend)
        for _ in range(manager.request_strategy_replan()):
            assert_same(model(IDS), before)
        assert graphs
        assert manager.strategy_replan_status.state == "done"
        whole = torch.compile(model, backend=backend)
        for _ in range(3):
            assert_same(whole(IDS), before)
        manager.release()


def test_a_compile_fn_that_fails_leaves_the_unit_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    model = Stack(3)

    def compile_fn(unit: nn.Module) -> Callable[..., Any]:
        if unit is model.layers[1] or len(caplog.records) == 0:
            raise ArithmeticError
        return unit

    manager = OffloadManager(device=HostDevice())
    with torch.no_grad(), caplog.at_level(logging.ERROR):
        before = model(IDS)
        manager.offload(
            model, OffloadConfig(**QUICK, load_strategy=Everything()), compile_fn=compile_fn
        )
        for _ in range(5):
            assert_same(model(IDS), before)
        manager.release()
    assert "runs uncompiled" in caplog.text


def test_disabled_changes_nothing() -> None:
    model = Stack(2)
    config = OffloadConfig(enabled=False)
    assert flextensor.offload(model, config) is model
    assert "forward" not in model.layers[0].__dict__
    with flextensor.offload_block("b"):
        model(IDS)
    flextensor.release()


def test_a_timeline_where_diagnostics_are_wanted() -> None:
    model = Stack(3)
    for wanted in (True, False):
        with offloaded(model, enable_diagnostics=wanted, load_strategy=Everything()) as manager:
            for _ in range(6):
                model(IDS)
            passes = tensors_of(manager).timeline.passes()
            assert bool(passes) is wanted


def test_timings_of_an_earlier_run_lead_to_inference() -> None:
    model = Stack(3)
    with offloaded(model, load_strategy=Everything()) as manager:
        for _ in range(4):
            model(IDS)
        samples = tensors_of(manager).layer_statistics_collector.samples()
    with offloaded(model, load_strategy=Everything()) as manager:
        manager.adopt_timings(samples)
        assert manager.phase is Phase.INFERENCE
        model(IDS)
        assert tensors_of(manager).loader.counts.hits


def test_the_six_traps_and_what_else_the_glossary_names() -> None:
    from modelopt_lite.offload import strategies, traps

    for name in ("", "Warmup"):
        for direct in ("", "Direct"):
            assert hasattr(traps, f"{name}Trap{direct}")
    assert issubclass(traps.TrapInferDirect, object)
    assert issubclass(traps.TrapInfer, object)
    defaults = TensorManager.__init__.__kwdefaults__
    assert defaults is not None
    assert "_enable_untraced_tensor_discovery" in defaults
    assert callable(strategies.OptimizedRoundRobinAssignment)
    assert callable(StrictRoundRobinAssignment)
    assert all(hasattr(flextensor, name) for name in flextensor.__all__)


def test_module_level_names_work_on_the_named_manager() -> None:
    one, two = Stack(2), Stack(2)
    config = OffloadConfig(**QUICK, load_strategy=Everything())
    flextensor.offload(one, config)
    flextensor.offload(two, config, name="two")
    for _ in range(3):
        one(IDS)
        two(IDS)
    two(IDS)
    assert flextensor.strategy_replan_status("two").can_request
    assert flextensor.request_strategy_replan("two") == 5
    flextensor.suspend_profiling()
    flextensor.resume_profiling()
    with flextensor.pause_profiling():
        pass
    flextensor.sync_prev_onload()
    flextensor.clear_profiling_durations()
    flextensor.update_state("two")
    assert dict(flextensor.resident_units("two")).keys() == set()
    flextensor.release("two")
    assert flextensor.get_offload_manager().phase is Phase.INFERENCE
