"""What must hold beside the outputs: true weights, clear refusals, nothing left behind."""

from __future__ import annotations

import copy
import io
import logging
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from oracle import QUICK, Everything, Stack, assert_same, offloaded, snapshot, tensors_of
from torch import nn

from modelopt_lite.errors import OffloadError, StrategyComputeError
from modelopt_lite.offload import HostDevice, OffloadConfig, OffloadManager, Phase
from modelopt_lite.offload.ledger import BLOCKS
from modelopt_lite.offload.simdevice import SimDevice


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def fail(*_: object) -> None:
    raise ArithmeticError


IDS = torch.arange(10).view(2, 5)


def phases(model: nn.Module, manager: OffloadManager) -> Iterator[Phase]:
    """Run passes until INFERENCE and one more, yielding in between."""
    while manager.phase is not Phase.INFERENCE:
        yield manager.phase
        with torch.no_grad():
            model(IDS)
    yield manager.phase
    with torch.no_grad():
        model(IDS)
    yield manager.phase


def test_true_weights_in_every_phase() -> None:
    model = Stack(5)
    values = copy.deepcopy(model.state_dict())
    seen = set()
    with offloaded(model, load_strategy=Everything(2)) as manager:
        for phase in phases(model, manager):
            seen.add(phase)
            assert_same(dict(model.state_dict()), dict(values))
            file = io.BytesIO()
            torch.save(model.state_dict(), file)
            file.seek(0)
            assert_same(dict(torch.load(file)), dict(values))
            assert_same(copy.deepcopy(model.layers[0].up.weight).data, values["layers.0.up.weight"])
    assert seen == {Phase.DISCOVERY, Phase.PROFILING, Phase.INFERENCE}


@pytest.mark.parametrize(
    "change",
    [
        copy.deepcopy,
        copy.copy,
        lambda model: model.to("cpu", torch.float64),
        lambda model: model.half(),
        lambda model: model.double(),
        lambda model: model.layers[1].half(),
        lambda model: model.layers[1].up.to(torch.float64),
        lambda model: copy.deepcopy(model.layers),
        lambda model: copy.deepcopy(model.layers[1].up),
        lambda model: nn.ModuleList([model]).half(),
        lambda model: copy.deepcopy(nn.ModuleList([model])),
        lambda model: torch.save(model, io.BytesIO()),
    ],
)
def test_moving_and_copying_is_refused(change: Any) -> None:
    model = Stack(3)
    with offloaded(model, load_strategy=Everything(2)) as manager:
        for _ in phases(model, manager):
            with pytest.raises(OffloadError, match="release"):
                change(model)
    copy.deepcopy(model).half()


def test_release_after_failures_in_offload(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Stack(3)
    before = snapshot(model)
    for place in ("place", "assign"):
        with monkeypatch.context() as patch:
            patch.setattr(
                f"modelopt_lite.offload.tensors.TensorManager.{place}",
                fail,
            )
            manager = OffloadManager(device=HostDevice())
            with pytest.raises(ArithmeticError):
                manager.offload(model, OffloadConfig(**QUICK))
        assert manager.phase is Phase.NOT_INITIALIZED
        assert_same(snapshot(model), before)
    with monkeypatch.context() as patch:
        patch.setattr(OffloadManager, "_begin", fail)
        with pytest.raises(ArithmeticError):
            manager.offload(model, OffloadConfig(**QUICK))
    assert_same(snapshot(model), before)
    with offloaded(model, load_strategy=Everything()):
        model(IDS)


def test_release_keeps_hooks_and_forwards_of_the_user() -> None:
    model, seen = Stack(3), []
    model.register_forward_hook(lambda *_: seen.append("root"))
    model.layers[1].register_forward_pre_hook(lambda *_: seen.append("unit"))
    own = model.layers[0].forward
    model.layers[0].forward = own
    replaced = model.layers[0].forward
    hooks = dict(model._forward_hooks)
    manager = OffloadManager(device=HostDevice())
    manager.offload(model, OffloadConfig(**QUICK, load_strategy=Everything()))
    for _ in range(5):
        model(IDS)
    assert seen == ["unit", "root"] * 5
    manager.release()
    assert model.layers[0].forward is replaced
    assert dict(model._forward_hooks) == hooks
    assert not hasattr(model.layers[0], "_ft_offload_name")
    model(IDS)


def test_release_in_every_phase_gives_memory_back() -> None:
    for passes in range(6):
        model = Stack(3)
        with torch.no_grad():
            before = model(IDS)
            with offloaded(model, SimDevice(1 << 20), load_strategy=Everything(2)):
                for _ in range(passes):
                    model(IDS)
            assert_same(model(IDS), before)
        for parameter in model.parameters():
            size = parameter.numel() * parameter.element_size()
            assert parameter.untyped_storage().nbytes() == size  # no block kept alive


def test_the_ledger_knows_every_byte() -> None:
    model = Stack(4)
    total = sum(p.numel() * 4 for p in model.parameters())
    with torch.no_grad():
        keep = Everything(2, keep=lambda name: name.endswith("bias"))
        device = SimDevice(1 << 22)
        with offloaded(model, device, load_strategy=keep) as manager:
            for _ in range(5):
                model(IDS)
            ledger = tensors_of(manager).ledger
            usage = manager.get_gpu_memory_usage()
            assert usage.blocks_bytes == ledger.held(BLOCKS)["device"] == device.used
            moving = sum(
                m.tensor.nbytes
                for cargo in tensors_of(manager)._cargos.values()
                for m in cargo.tensors
            )
            assert usage.unmapped_tensors_bytes == total - moving
            assert usage.total_mb * 2**20 == usage.total_bytes


def test_a_model_that_is_compiled_is_refused() -> None:
    compiled: Any = torch.compile(Stack(2), backend="eager")
    with pytest.raises(OffloadError, match="compile"):
        OffloadManager().offload(compiled, OffloadConfig(**QUICK))


def test_a_model_on_meta_is_refused() -> None:
    with torch.device("meta"):
        model = Stack(2)
    with pytest.raises(OffloadError, match="meta"):
        OffloadManager(device=HostDevice()).offload(model, OffloadConfig(**QUICK))
    assert "forward" not in model.layers[0].__dict__


def test_nothing_to_offload_is_an_error() -> None:
    patterns = ({"include_patterns": ["nowhere.*"]}, {"exclude_patterns": ["*"]})
    for fields in patterns:
        options: dict[str, Any] = {**QUICK, **fields}
        with pytest.raises(OffloadError, match="nothing is offloaded"):
            OffloadManager(device=HostDevice()).offload(Stack(2), OffloadConfig(**options))


def test_another_thread_is_refused() -> None:
    model, errors = Stack(2), []
    with offloaded(model, load_strategy=Everything()) as manager:

        def other() -> None:
            for call in (lambda: model(IDS), manager.update_state):
                try:
                    call()
                except OffloadError as error:
                    errors.append(str(error))

        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        assert len(errors) == 2
        assert all("thread" in error for error in errors)


def test_passes_that_bypass_the_model_are_told(caplog: pytest.LogCaptureFixture) -> None:
    model = Stack(2)
    with offloaded(model, load_strategy=Everything()) as manager:
        with caplog.at_level(logging.WARNING, "modelopt_lite.offload"):
            for _ in range(5):
                model.layers[0](torch.rand(2, 16))
        assert caplog.text.count("update_state()") == 1
        for _ in range(3):
            model.layers[0](torch.rand(2, 16))
            manager.update_state()
        assert manager.phase is Phase.INFERENCE


def test_a_copy_that_fails_is_raised_once_and_tried_again() -> None:
    model = Stack(3)
    with torch.no_grad():
        before = model(IDS)
        for device in (HostDevice(), SimDevice(1 << 20)):
            manager = OffloadManager(device=device)
            manager.offload(model, OffloadConfig(**QUICK, load_strategy=Everything(2)))
            for _ in range(4):
                model(IDS)
            cargo = tensors_of(manager).loader._cargos["layers.1"]

            class Broken:
                def read_into(self, dst: torch.Tensor) -> None:
                    raise OSError("the disk is gone")

            source = cargo.source
            object.__setattr__(cargo, "source", Broken())
            run = [lambda: model(IDS)] * 3
            with pytest.raises(OSError, match="disk is gone"):
                [call() for call in run]
            object.__setattr__(cargo, "source", source)
            for _ in range(3):
                assert_same(model(IDS), before)
            manager.release()
            device.close()
            assert_same(model(IDS), before)


def test_blocks_that_do_not_fit_leave_the_old_state() -> None:
    model = Stack(3)
    biggest = max(sum(p.nbytes for p in layer.parameters()) for layer in model.layers)
    device = SimDevice(biggest + 1024)
    manager = OffloadManager(device=device)
    manager.offload(model, OffloadConfig(**QUICK, load_strategy=Everything(3)))
    with torch.no_grad():
        expected = Stack.forward(model, IDS)
        model(IDS)
        for _ in range(2):
            with pytest.raises((torch.OutOfMemoryError, StrategyComputeError)):
                [model(IDS) for _ in range(2)]
        manager.release()
        assert device.used == 0
        assert_same(model(IDS), expected)
