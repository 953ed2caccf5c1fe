"""What users do to an offloaded model beside calling it: right, or refused, in every phase."""

from __future__ import annotations

import contextlib
import copy
import itertools
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from modelopt_lite.errors import OffloadError
from modelopt_lite.offload.config import OffloadConfig
from modelopt_lite.offload.device import HostDevice
from modelopt_lite.offload.disk import open_from_disk
from modelopt_lite.offload.manager import OffloadManager, Phase
from modelopt_lite.offload.simdevice import SimDevice
from modelopt_lite.offload.strategies import NthLayerStrategy

WIDTH = 200
INDIRECT: dict[str, Any] = {"profile_mode": "torch_function", "transfer_mode": "strategy"}

both_devices = pytest.mark.parametrize("device", [HostDevice, lambda: SimDevice(1 << 26)])
both_modes = pytest.mark.parametrize("mode", [{}, INDIRECT], ids=["direct", "indirect"])


class Layer(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = x + self.dropout(torch.relu(self.linear(self.norm(x))))
        return made


def stack(dropout: float = 0.0) -> Any:
    torch.manual_seed(0)
    return nn.Sequential(*(Layer(dropout) for _ in range(5))).eval().requires_grad_(False)


@contextlib.contextmanager
def offloaded(model: nn.Module, device: Any, **fields: Any) -> Iterator[OffloadManager]:
    manager = OffloadManager(device=device)
    if isinstance(device, SimDevice):
        manager.on_compute = lambda label: device.compute(label, 1.0)
    fields.setdefault("load_strategy", NthLayerStrategy(1))  # all of them come and go
    manager.offload(model, OffloadConfig(include_patterns=["*"], profiling_iters=2, **fields))
    try:
        yield manager
    finally:
        manager.release()


def x_of(rows: int = 3) -> Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(1))


def assert_same(model: nn.Module, reference: nn.Module, x: Tensor, passes: int = 1) -> None:
    for seed in range(passes):
        torch.manual_seed(seed)
        with torch.no_grad():
            expected = reference(x)
        torch.manual_seed(seed)
        with torch.no_grad():
            assert torch.equal(model(x), expected)


def assert_same_state(model: nn.Module, reference: nn.Module) -> None:
    expected = reference.state_dict()
    for name, value in model.state_dict().items():
        assert torch.equal(value, expected[name]), name


@both_devices
@both_modes
def test_values_that_are_given_by_data_are_used(device: Any, mode: dict[str, Any]) -> None:
    reference = stack()
    model = copy.deepcopy(reference)
    with offloaded(model, device(), **mode) as manager:
        for index in range(8):
            value = torch.randn(WIDTH, WIDTH)
            reference[index % 5].linear.weight.data = value
            model[index % 5].linear.weight.data = value.clone()
            assert_same(model, reference, x_of())
            assert_same_state(model, reference)
        assert manager.phase is Phase.INFERENCE
    assert_same_state(model, reference)


def test_values_that_are_given_by_data_are_used_beside_a_disk(tmp_path: Path) -> None:
    reference = stack()
    save_file(reference.state_dict(), tmp_path / "model.safetensors")
    model = open_from_disk(stack, tmp_path)
    before = (tmp_path / "model.safetensors").read_bytes()
    with offloaded(model, HostDevice()):
        for index in range(8):
            value = torch.randn(WIDTH, WIDTH)
            reference[index % 5].linear.weight.data = value
            model[index % 5].linear.weight.data = value.clone()
            assert_same(model, reference, x_of())
            assert_same_state(model, reference)
    assert_same_state(model, reference)
    assert (tmp_path / "model.safetensors").read_bytes() == before


def test_values_of_another_shape_are_refused() -> None:
    model = stack()
    with offloaded(model, HostDevice()):
        model[2].linear.weight.data = torch.zeros(WIDTH, 3)
        with pytest.raises(OffloadError, match=r"'2.linear.weight' was given"):
            model(x_of())


@both_devices
@both_modes
def test_weights_that_are_loaded_between_passes_are_used(device: Any, mode: dict[str, Any]) -> None:
    reference = stack()
    model = copy.deepcopy(reference)
    with offloaded(model, device(), **mode):
        for _ in range(6):
            new = {name: torch.randn_like(value) for name, value in reference.state_dict().items()}
            reference.load_state_dict(new)
            model.load_state_dict(new)
            assert_same(model, reference, x_of())
            assert_same_state(model, reference)
    assert_same_state(model, reference)


@both_devices
@both_modes
def test_weights_that_are_loaded_over_those_on_disk_are_used(
    device: Any, mode: dict[str, Any], tmp_path: Path
) -> None:
    reference = stack()
    save_file(reference.state_dict(), tmp_path / "model.safetensors")
    before = (tmp_path / "model.safetensors").read_bytes()
    model = open_from_disk(stack, tmp_path)
    with offloaded(model, device(), **mode):
        for index in range(8):
            assert_same(model, reference, x_of())
            if index % 2:
                name = f"{index % 5}.linear.weight"
                new = {**reference.state_dict(), name: torch.randn(WIDTH, WIDTH)}
                reference.load_state_dict(new)
                model.load_state_dict(new)
            assert_same_state(model, reference)
    assert_same(model, reference, x_of())
    assert_same_state(model, reference)
    assert (tmp_path / "model.safetensors").read_bytes() == before


class Shows(nn.Module):
    """Returns a view of its weight beside what it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH**0.5)

    def forward(self, x: Tensor) -> dict[str, Any]:
        return {"x": x @ self.weight, "weights": [self.weight, self.weight.t()[:3]]}


class ShowsAll(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Shows() for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for layer in self.layers:
            found = layer(x)
            x = found["x"]
            kept.append(found["weights"])
        for whole, some in kept:
            x = x @ whole + (x @ some.t()).sum()
        return x


@both_devices
@both_modes
def test_weights_that_a_unit_returns_keep_their_values(device: Any, mode: dict[str, Any]) -> None:
    torch.manual_seed(4)
    reference = ShowsAll().eval().requires_grad_(False)
    model = copy.deepcopy(reference)
    manager = OffloadManager(device=(place := device()))
    if isinstance(place, SimDevice):
        manager.on_compute = lambda label: place.compute(label, 1.0)
    fields: dict[str, Any] = {"load_strategy": NthLayerStrategy(1), "profiling_iters": 2, **mode}
    manager.offload(model, OffloadConfig(include_patterns=["layers.*"], **fields))
    assert_same(model, reference, x_of(), passes=6)
    assert manager.phase is Phase.INFERENCE
    manager.release()


def attention() -> nn.Module:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 256, batch_first=True)
    return nn.Sequential(layer, nn.Linear(WIDTH, WIDTH), copy.deepcopy(layer)).eval()


@both_devices
def test_modules_that_compute_otherwise_under_a_mode_give_the_same_bits(device: Any) -> None:
    reference = attention().requires_grad_(False)
    model = copy.deepcopy(reference)
    forwards = [module.__dict__.get("forward") for module in model.modules()]
    x = torch.randn(2, 5, WIDTH)
    with offloaded(model, device()) as manager:
        assert_same(model, reference, x, passes=6)
        assert manager.phase is Phase.INFERENCE
    assert [module.__dict__.get("forward") for module in model.modules()] == forwards


@both_devices
@both_modes
def test_exceptions_between_passes_and_new_plans(device: Any, mode: dict[str, Any]) -> None:
    reference = stack()
    model = copy.deepcopy(reference)
    failing = [False]

    def fail(module: nn.Module, args: Any) -> None:
        if failing[0]:
            raise ValueError("on purpose")

    model[3].linear.register_forward_pre_hook(fail)
    with offloaded(model, device(), **mode) as manager:
        for index in range(10):
            failing[0] = True
            with pytest.raises(ValueError, match="on purpose"):
                model(x_of())
            failing[0] = False
            assert_same(model, reference, x_of())
            assert_same_state(model, reference)
            if index in (4, 7):
                assert manager.request_strategy_replan() or index == 7
        assert manager.phase is Phase.INFERENCE


def with_weight_norm() -> Any:
    model = stack()
    for layer in model:
        nn.utils.parametrizations.weight_norm(layer.linear)
    return model


def trained_with_spectral_norm() -> Any:
    model = stack().train()
    for layer in model:
        nn.utils.parametrizations.spectral_norm(layer.linear)
    return model


@both_devices
@both_modes
@pytest.mark.parametrize(
    "build",
    [
        lambda: stack(dropout=0.3).train(),
        lambda: stack().double(),
        with_weight_norm,
        trained_with_spectral_norm,
    ],
    ids=["dropout", "float64", "weight_norm", "spectral_norm"],
)
def test_other_kinds_of_modules(
    device: Any, mode: dict[str, Any], build: Callable[[], nn.Module]
) -> None:
    reference = build()
    model = copy.deepcopy(reference)
    x = x_of().to(next(reference.parameters()).dtype)
    with offloaded(model, device(), **mode):
        assert_same(model, reference, x, passes=6)
        assert_same_state(model, reference)
    assert_same_state(model, reference)


@both_devices
@both_modes
def test_autocast_that_keeps_its_casts_from_pass_to_pass(device: Any, mode: dict[str, Any]) -> None:
    reference = stack().requires_grad_(True)
    model = copy.deepcopy(reference)
    with offloaded(model, device(), **mode), torch.autocast("cpu", torch.bfloat16):
        assert_same(model, reference, x_of(), passes=6)


@pytest.mark.parametrize("warm", [0, 1, 4])
def test_another_thread_is_refused_and_does_no_harm(warm: int) -> None:
    reference = stack()
    model = copy.deepcopy(reference)
    errors: list[BaseException] = []

    def call() -> None:
        try:
            model(x_of())
        except OffloadError as error:
            errors.append(error)

    with offloaded(model, HostDevice()) as manager:
        assert_same(model, reference, x_of(), passes=warm)

        def meet(module: nn.Module, args: Any) -> None:
            other = threading.Thread(target=call)
            other.start()
            other.join()

        handle = model[2].register_forward_pre_hook(meet)  # in the middle of this thread's pass
        assert_same(model, reference, x_of(), passes=3)
        handle.remove()
        assert len(errors) == 3
        assert all("belongs to thread" in str(error) for error in errors)
        assert_same(model, reference, x_of(), passes=6)
        assert manager.phase is Phase.INFERENCE
    assert_same_state(model, reference)


@both_devices
def test_memory_on_demand_is_of_the_size_of_the_unit(device: Any) -> None:
    widths = [WIDTH, 4 * WIDTH, WIDTH, WIDTH, WIDTH, WIDTH, WIDTH]
    pairs = itertools.pairwise(widths)
    reference = nn.Sequential(*(nn.Linear(*pair) for pair in pairs)).requires_grad_(False)
    used: dict[str, list[int]] = {}
    for mode in ("allocation_block_transfer", "strategy"):
        model, place = copy.deepcopy(reference), device()
        fields: dict[str, Any] = {"transfer_mode": mode, "load_strategy": NthLayerStrategy(1)}
        with offloaded(model, place, **fields) as manager:
            assert_same(model, reference, x_of(), passes=4)
            assert manager.phase is Phase.INFERENCE
            found = used.setdefault(mode, [])
            for layer in model:
                layer.register_forward_hook(lambda *_, p=place, f=found: f.append(p.used))
            assert_same(model, reference, x_of())
    assert len(set(used["allocation_block_transfer"])) == 1
    assert max(used["strategy"]) <= used["allocation_block_transfer"][0]
    assert min(used["strategy"]) < 0.5 * used["allocation_block_transfer"][0]
