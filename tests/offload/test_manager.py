"""An offloaded model gives the bits of the model before: kinds of models, phases, modes, orders."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from oracle import (
    CHECKED,
    DEVICES,
    QUICK,
    Block,
    Everything,
    Hybrid,
    Moe,
    Scaled,
    Stack,
    Views,
    assert_same,
    check_passes,
    offloaded,
    tensors_of,
)
from torch import Tensor, nn

from modelopt_lite.errors import OffloadError
from modelopt_lite.offload import HostDevice, OffloadConfig, OffloadManager, Phase, strategies
from modelopt_lite.offload.simdevice import SimDevice

MODES = ("allocation_block_transfer", "raw_block_transfer", "strategy")
PROFILES = ("view", "getter", "torch_function")
every_device = pytest.mark.parametrize("device", DEVICES)
every_device_there_is = pytest.mark.parametrize("device", CHECKED)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def token_ids() -> Tensor:
    return torch.randint(0, 20, (2, 5))


# --- kinds of models


@every_device_there_is
@pytest.mark.parametrize("tied", ["", "embeddings", "middle", "three"])
@pytest.mark.parametrize("include", [["*"], ["layers.*", "embed"], ["layers.*", "head"]])
def test_weights_that_are_tied(device: str, tied: str, include: list[str]) -> None:
    model, ids = Stack(tied=tied), token_ids()
    check_passes(
        model,
        lambda: model(ids),
        device=device,
        include_patterns=include,
        load_strategy=Everything(),
    )


@every_device_there_is
@pytest.mark.parametrize("profile_mode", PROFILES)
def test_views_of_one_storage_and_odd_shapes(device: str, profile_mode: str) -> None:
    model, x = Views(), torch.randn(3, 8)
    check_passes(
        model,
        lambda: model(x),
        device=device,
        load_strategy=Everything(),
        profile_mode=profile_mode,
        transfer_mode="strategy",
    )


@every_device_there_is
@pytest.mark.parametrize("profile_mode", PROFILES)
@pytest.mark.parametrize("shared", [False, True])
def test_fields_move_with_their_weight(device: str, profile_mode: str, shared: bool) -> None:
    zero = torch.ones((), dtype=torch.int32) if shared else None
    model, x = nn.Sequential(*(Scaled(8, zero) for _ in range(4))), torch.randn(2, 8)

    def look(manager: OffloadManager) -> None:
        tensors = tensors_of(manager)
        names = [m.name for cargo in tensors._cargos.values() for m in cargo.tensors]
        assert "0.weight.scale" in names
        assert ("0.weight.zero_point" in names) is not shared  # read by all: it stays

    check_passes(
        model,
        lambda: model(x),
        device=device,
        load_strategy=Everything(),
        profile_mode=profile_mode,
        transfer_mode="strategy",
        in_inference=look,
    )


@every_device_there_is
def test_a_model_of_several_kinds_of_layers(device: str) -> None:
    model, x = Hybrid(), torch.randn(2, 3, 16)
    check_passes(
        model,
        lambda: model(x),
        device=device,
        load_strategy=Everything(),
        include_patterns=["layers.*"],
    )


@every_device
@pytest.mark.parametrize("include", [["layers.*"], ["layers.*.experts.*", "layers.1"]])
def test_experts_in_an_order_that_the_data_decide(device: str, include: list[str]) -> None:
    model = Moe()
    inputs = [torch.randn(2, 3, 16) for _ in range(8)]
    with torch.no_grad():
        before = [model(x) for x in inputs]
        with offloaded(
            model, device, include_patterns=include, load_strategy=Everything(3)
        ) as manager:
            for _ in range(2):
                for x, expected in zip(inputs, before, strict=True):
                    assert_same(model(x), expected)
            assert manager.phase is Phase.INFERENCE


def test_experts_that_never_ran_share_the_budget() -> None:
    model, x = Moe(), torch.randn(2, 3, 16)
    total = sum(p.numel() * 4 for p in model.parameters())
    with torch.no_grad():
        before = model(x)
        device = SimDevice(total)
        with offloaded(
            model,
            device,
            include_patterns=["layers.*.experts.*", "layers.1"],
            max_gpu_mem_fraction=0.5,
        ) as manager:
            for _ in range(6):
                assert_same(model(x), before)
            assert manager.get_gpu_memory_usage().total_bytes <= total // 2


# --- modes and strategies


@every_device_there_is
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("profile_mode", ["view", "getter"])
def test_transfer_and_profile_modes(device: str, mode: str, profile_mode: str) -> None:
    model, ids = Stack(), token_ids()
    check_passes(
        model,
        lambda: model(ids),
        device=device,
        transfer_mode=mode,
        profile_mode=profile_mode,
        load_strategy=Everything(3),
    )


@pytest.mark.parametrize("device", ["host", "sim"])
@pytest.mark.parametrize("fraction", [None, 0.85])
@pytest.mark.parametrize(
    "make",
    [
        strategies.KnapsackStrategy,
        strategies.KnapsackBlockStrategy,
        strategies.AdaptiveKnapsackStrategy,
        strategies.AdaptiveStrategy,
        strategies.GlobalOffloadStrategy,
        strategies.GlobalTensorSelectionStrategy,
        lambda: strategies.NthLayerStrategy(1),
        strategies.GreedyStrategy,
        lambda: None,
    ],
)
def test_strategies(device: str, fraction: float | None, make: Any) -> None:
    model = nn.Sequential(*(nn.Linear(48, 48, bias=False) for _ in range(5)))
    x = torch.randn(2, 48)
    total = sum(p.numel() * 4 for p in model.parameters())
    made = HostDevice(total) if device == "host" else SimDevice(total, curve=lambda n: n / 1e5)

    def look(manager: OffloadManager) -> None:
        if fraction is not None:
            assert manager.get_gpu_memory_usage().total_bytes <= total * fraction

    check_passes(
        model,
        lambda: model(x),
        device=made,
        load_strategy=make(),
        max_gpu_mem_fraction=fraction,
        in_inference=look,
    )


def test_a_budget_that_cannot_be_met() -> None:
    from modelopt_lite.errors import StrategyComputeError

    model, ids = Stack(6, 64), token_ids()
    total = sum(p.numel() * 4 for p in model.parameters())
    manager = OffloadManager(device=SimDevice(10 * total))
    config = OffloadConfig(**QUICK, include_patterns=["layers.*"], max_gpu_mem_fraction=0.012)
    manager.offload(model, config)
    with torch.no_grad():
        model(ids)
        model(ids)
        with pytest.raises(StrategyComputeError) as caught:
            model(ids)
        assert manager.phase is Phase.PROFILING
        with pytest.raises(StrategyComputeError):
            model(ids)
    manager.release()
    smallest = caught.value.smallest_budget
    assert smallest is not None
    assert f"{smallest:,}" not in ("", "0")
    fraction = smallest / (10 * total)
    with (
        torch.no_grad(),
        offloaded(
            model,
            SimDevice(10 * total),
            include_patterns=["layers.*"],
            max_gpu_mem_fraction=fraction + 1e-9,
        ) as manager,
    ):
        for _ in range(4):
            model(ids)
        assert manager.get_gpu_memory_usage().total_bytes <= smallest


# --- orders


@every_device
@pytest.mark.parametrize("blocks", [1, 2, 3])
@pytest.mark.parametrize("profile_mode", ["view", "torch_function"])
def test_units_in_other_orders(device: str, blocks: int, profile_mode: str) -> None:
    model, ids = Stack(5), token_ids()
    orders = [
        [4, 3, 2, 1, 0],
        [0, 2, 4],
        [1],
        [],
        [3, 3, 3],
        [0, 1, 0, 1, 2, 2],
        [2, 3, 4],
        [0, 1, 2, 3, 4],
    ]
    with torch.no_grad():
        before = {}
        for number, model.order in enumerate([None, *orders]):
            before[number] = model(ids)
        with offloaded(
            model,
            device,
            load_strategy=Everything(blocks),
            profile_mode=profile_mode,
            transfer_mode="strategy",
        ):
            for _ in range(2):
                for number, model.order in enumerate([None, *orders]):
                    assert_same(model(ids), before[number])


@every_device
def test_the_pass_after_one_that_failed(device: str) -> None:
    model, ids = Stack(5), token_ids()
    with torch.no_grad():
        before = model(ids)
        with offloaded(model, device, load_strategy=Everything()) as manager:
            for at in (3, 0, 4, 1, 2):
                for model.fail_at in (at, None, at, at, None):
                    if model.fail_at is None:
                        assert_same(model(ids), before)
                    else:
                        with pytest.raises(ArithmeticError):
                            model(ids)
            assert manager.phase is Phase.INFERENCE
            model.fail_at = None


class Fails(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.fails = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        if self.fails:
            raise ArithmeticError
        return x


@every_device
def test_a_unit_that_fails(device: str) -> None:
    model, x = nn.Sequential(*(Fails() for _ in range(4))), torch.randn(2, 8)
    with torch.no_grad():
        before = model(x)
        with offloaded(model, device, load_strategy=Everything()):
            for number in range(8):
                unit: Any = model[number % 4]
                unit.fails = True
                with pytest.raises(ArithmeticError):
                    model(x)
                unit.fails = False
                assert_same(model(x), before)


@every_device
def test_two_models_at_once(device: str) -> None:
    one, two, ids = Stack(4), Stack(3, 24), token_ids()
    with torch.no_grad():
        first, second = one(ids), two(ids)
        with (
            offloaded(one, device, load_strategy=Everything()),
            offloaded(two, device, load_strategy=Everything(3)),
        ):
            for _ in range(5):
                assert_same(one(ids), first)
                assert_same(two(ids), second)
        with offloaded(one, device, load_strategy=Everything()) as manager:
            with pytest.raises(OffloadError, match="another manager"):
                OffloadManager().offload(one, OffloadConfig(**QUICK))
            with pytest.raises(OffloadError, match="has a model already"):
                manager.offload(two)
            assert_same(one(ids), first)


class Calls(nn.Module):
    """A unit that calls another, and itself."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.other: list[nn.Module] = []

    def forward(self, x: Tensor, depth: int = 0) -> Tensor:
        x = self.inner(x)
        for other in self.other:
            x = other(x)
        if depth:
            x = self(x, depth - 1)
        y: Tensor = self.inner(x)
        return y


@every_device_there_is
@pytest.mark.parametrize("blocks", [1, 2])
@pytest.mark.parametrize("profile_mode", ["view", "torch_function"])
def test_nested_calls_and_recursion(device: str, blocks: int, profile_mode: str) -> None:
    model: Any = nn.ModuleList(Calls() for _ in range(4))
    x = torch.randn(2, 8)
    model[0].other = [model[1], model[2]]
    model[3].other = [model[0]]

    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.units = model

        def forward(self, x: Tensor) -> Tensor:
            for depth, unit in enumerate(self.units):
                x = unit(x, depth)
            return x

    root = Root()
    check_passes(
        root,
        lambda: root(x),
        device=device,
        load_strategy=Everything(blocks),
        include_patterns=["units.*"],
        profile_mode=profile_mode,
        transfer_mode="strategy",
    )


class ReadsAside(nn.Module):
    """Uses the weight of a unit without calling it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 16)
        self.layers: Any = nn.ModuleList(Block(16) for _ in range(3))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        x = self.layers[1].up(x)[..., :16]
        return nn.functional.linear(x.to(self.embed.weight.dtype), self.embed.weight)


@every_device_there_is
def test_a_weight_that_is_read_outside_of_its_unit_stays(device: str) -> None:
    model, ids = ReadsAside(), token_ids()

    def look(manager: OffloadManager) -> None:
        tensors = tensors_of(manager)
        moving = {m.name for cargo in tensors._cargos.values() for m in cargo.tensors}
        assert "embed.weight" not in moving
        assert "layers.1.up.weight" not in moving
        assert "layers.1.down.weight" in moving
        assert "layers.0.up.weight" in moving

    check_passes(
        model, lambda: model(ids), device=device, load_strategy=Everything(), in_inference=look
    )


# --- how it is run


@pytest.mark.parametrize("context", [torch.inference_mode, torch.no_grad, torch.enable_grad])
@every_device
def test_grad_modes(device: str, context: Any) -> None:
    model, ids = Stack(), token_ids()
    with context():
        before = model(ids).detach()
    with offloaded(model, device, load_strategy=Everything()):
        for _ in range(5):
            with context():
                assert_same(model(ids).detach(), before)
        with torch.enable_grad(), pytest.raises(OffloadError, match="no_grad"):
            model(ids).sum().backward()
        with torch.no_grad():
            assert_same(model(ids), before)
        model.zero_grad()


@every_device
def test_values_changed_in_place_are_seen(device: str) -> None:
    model, other, ids = Stack(), Stack(), token_ids()
    original = copy.deepcopy(model.state_dict())
    with torch.no_grad():
        first, second = model(ids), other(ids)
        manager = OffloadManager(device=DEVICES[device]())
        manager.offload(model, OffloadConfig(**QUICK, load_strategy=Everything(4)))
        for state, expected in ((other.state_dict(), second), (original, first)) * 4:
            model.load_state_dict(state)
            assert_same(model(ids), expected)
            assert_same(model(ids), expected)
        model.layers[0].up.weight.add_(1.0)
        changed = model(ids)
        manager.release()
        assert not torch.equal(changed, first)
        assert_same(model(ids), changed)


class Counts(nn.Module):
    """Changes its own weight in each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        self.weight.add_(1.0)
        return x + self.weight


@every_device
def test_values_that_a_unit_changes_are_kept(device: str) -> None:
    model: Any = nn.Sequential(*(Counts() for _ in range(4)))
    manager = OffloadManager(device=DEVICES[device]())
    with torch.no_grad():
        manager.offload(model, OffloadConfig(**QUICK, load_strategy=Everything()))
        for number in range(1, 8):
            assert model(torch.zeros(4)).tolist() == [4.0 * number] * 4
            assert model[2].weight.tolist() == [float(number)] * 4
        manager.release()
    assert model[3].weight.tolist() == [7.0] * 4


@pytest.mark.parametrize("device", ["host", "sim"])
@pytest.mark.parametrize("tied", [False, True])
def test_generate_and_save_pretrained(device: str, tied: bool, tmp_path: Any) -> None:
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        tie_word_embeddings=tied,
    )
    model = LlamaForCausalLM(config).eval()
    ids = torch.tensor([[1, 5, 7]])
    asked = {"max_new_tokens": 8, "do_sample": False, "min_new_tokens": 8}
    before, logits = model.generate(ids, **asked), model(ids).logits.detach()
    include = ["model.layers.*", "model.embed_tokens", "lm_head"]
    with offloaded(model, device, include_patterns=include, load_strategy=Everything()) as manager:
        for _ in range(3):
            assert torch.equal(model.generate(ids, **asked), before)
            folder = tmp_path / str(manager.phase.name)
            model.save_pretrained(folder)
            loaded = AutoModelForCausalLM.from_pretrained(folder).eval()
            assert_same(loaded(ids).logits.detach(), logits)
        assert manager.phase is Phase.INFERENCE
