"""Profiles by the module-level names, and what else begins or ends an offloaded model."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import QUICK, Everything, Stack, assert_same, snapshot, tensors_of
from safetensors.torch import save_file
from torch import nn

import modelopt_lite.offload as flextensor
from modelopt_lite.errors import OffloadConfigError, OffloadError
from modelopt_lite.offload import HostDevice, OffloadConfig, OffloadManager, Phase, Profile, api
from modelopt_lite.offload.disk import open_from_disk

IDS = torch.arange(10).view(2, 5)
CONFIG = OffloadConfig(**QUICK, load_strategy=Everything())


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch.manual_seed(0)
    with torch.no_grad():
        yield
    for manager in api._managers.values():
        manager.release()
    api._managers.clear()


def stack(n: int = 3, tied: str = "") -> Stack:
    torch.manual_seed(3)
    return Stack(n, tied=tied)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the profile of `stack`, the manager released."""
    model = flextensor.offload(stack(), CONFIG)
    for _ in range(3):
        model(IDS)
    assert flextensor.save_profile(tmp_path / "profile") == tmp_path / "profile/profile.json"
    flextensor.release()
    return tmp_path / "profile"


def test_saved_and_loaded(folder: Path) -> None:
    model, expected = stack(), stack()(IDS)
    flextensor.load_profile(folder, model)
    assert flextensor.get_offload_manager().phase is Phase.NOT_INITIALIZED
    assert flextensor.offload(model, CONFIG) is model
    assert flextensor.get_offload_manager().phase is Phase.INFERENCE
    assert_same(model(IDS), expected)
    flextensor.load_profile(folder)  # for the model that is offloaded
    flextensor.release()
    flextensor.offload(model, CONFIG)
    assert flextensor.get_offload_manager().phase is Phase.INFERENCE
    flextensor.release()
    flextensor.offload(model, CONFIG)  # a profile serves once
    assert flextensor.get_offload_manager().phase is Phase.DISCOVERY


def test_offload_from_profile_compiles_and_takes_names(folder: Path) -> None:
    model, compiled = stack(), []

    def compile_fn(unit: nn.Module) -> Any:
        compiled.append(unit)
        return unit

    expected = model(IDS)
    flextensor.offload_from_profile(model, folder, CONFIG, "other", compile_fn)
    manager = flextensor.get_offload_manager("other")
    assert manager.phase is Phase.INFERENCE
    assert len(compiled) == len(manager.offload_units()) == 6
    assert manager.iters_before_inference == 0
    assert_same(model(IDS), expected)


@pytest.mark.parametrize("how", ["load", "offload"])
def test_another_models_profile_names_the_first_difference(folder: Path, how: str) -> None:
    model = stack(4)
    before = snapshot(model)
    message = r"'layers\.3' is missing in the profile and oracle\.Block in the model"
    calls = {
        "load": lambda: flextensor.load_profile(folder, model),
        "offload": lambda: flextensor.offload_from_profile(model, folder, CONFIG),
    }
    with pytest.raises(OffloadError, match=message):
        calls[how]()
    assert_same(snapshot(model), before)
    flextensor.offload(model, CONFIG)
    assert flextensor.get_offload_manager().phase is Phase.DISCOVERY


def test_patterns_are_compared_at_offload(folder: Path) -> None:
    flextensor.load_profile(folder, stack())
    other = CONFIG.model_copy(update={"include_patterns": ["layers.*"]})
    with pytest.raises(OffloadError, match="include_patterns"):
        flextensor.offload(stack(), other)
    assert flextensor.get_offload_manager().phase is Phase.NOT_INITIALIZED


def test_what_a_profile_needs(tmp_path: Path) -> None:
    with pytest.raises(OffloadError, match="no model"):
        flextensor.load_profile(tmp_path)
    with pytest.raises(OffloadError, match="call offload"):
        flextensor.save_profile(tmp_path)
    with pytest.raises(OffloadConfigError, match="profile_storage_dir"):
        flextensor.load_profile(model=stack())
    with pytest.raises(OffloadError, match="there is no profile"):
        flextensor.load_profile(tmp_path, stack())
    flextensor.init(CONFIG.model_copy(update={"profile_storage_dir": str(tmp_path)}))
    model = flextensor.offload(stack())
    for _ in range(3):
        model(IDS)
    flextensor.save_profile()
    flextensor.load_profile()


def test_a_state_in_memory() -> None:
    one = flextensor.offload(stack(), CONFIG)
    for _ in range(3):
        one(IDS)
    state = Profile.of(flextensor.get_offload_manager())
    two = stack()
    expected = two(IDS)
    flextensor.offload_from_state(two, state, CONFIG, "two", allow_strategy_replan=False)
    assert_same(two(IDS), expected)
    assert not flextensor.strategy_replan_status("two").can_request
    assert flextensor.request_strategy_replan("two") == 0
    flextensor.release("two")
    flextensor.offload_from_state(two, state, CONFIG, "two")
    assert flextensor.strategy_replan_status("two").can_request
    flextensor.release("two")
    other = stack(4)
    before = snapshot(other)
    with pytest.raises(OffloadError, match="does not fit"):
        flextensor.offload_from_state(other, state, CONFIG, "two")
    assert_same(snapshot(other), before)


@pytest.mark.parametrize("tied", ["", "embeddings"])
@pytest.mark.parametrize("shards", [1, 2])
def test_a_model_that_is_built_without_weights(tmp_path: Path, tied: str, shards: int) -> None:
    model = stack(tied=tied)
    expected = model(IDS)
    weights = {n: v for n, v in model.state_dict().items() if not (tied and n == "head.weight")}
    for shard in range(shards):
        part = {n: v for at, (n, v) in enumerate(weights.items()) if at % shards == shard}
        save_file(part, tmp_path / f"model-{shard}.safetensors")
    manager = flextensor.get_offload_manager()
    manager.set_config(CONFIG)
    manager.offload(model)
    for _ in range(3):
        model(IDS)
    manager.save_profile(tmp_path)
    manager.release()
    built: Any = flextensor.load_model_from_profile(
        manager, tmp_path, Stack, (3,), model_kwargs={"tied": tied}, strict=True, diagnose=True
    )
    assert manager.phase is Phase.INFERENCE
    assert (built.head.weight is built.embed.weight) is bool(tied)
    assert_same(built(IDS), expected)
    manager.release()
    assert_same(built(IDS), expected)
    assert_same(dict(built.state_dict()), dict(model.state_dict()))


def test_files_that_are_not_the_models(folder: Path) -> None:
    manager = flextensor.get_offload_manager()
    manager.set_config(CONFIG)
    weights = stack().state_dict()
    file = folder / "w.safetensors"

    def load(tensors: dict[str, Any], *, strict: bool = False) -> None:
        save_file(tensors, file)
        flextensor.load_model_from_profile(manager, folder, Stack, (3,), file, strict=strict)

    with pytest.raises(OffloadError, match=r"does not hold 'head\.weight'"):
        load({n: v for n, v in weights.items() if n != "head.weight"})
    with pytest.raises(OffloadError, match=r"'norm\.bias' is torch\.float16 \[16\] in"):
        load({**weights, "norm.bias": weights["norm.bias"].half()})
    with pytest.raises(OffloadError, match="holds 'extra'"):
        load({**weights, "extra": torch.ones(2)}, strict=True)
    assert manager.phase.name == "NOT_INITIALIZED"
    with pytest.raises(OffloadError, match="does not fit: the module"):
        flextensor.load_model_from_profile(manager, folder, Stack, (2,), file)
    with pytest.raises(OffloadError, match="cannot be read"):
        flextensor.load_model_from_profile(manager, folder, Stack, (3,), folder / "profile.json")
    load({**weights, "extra": torch.ones(2)})
    assert manager.phase.name == "INFERENCE"


class Buffered(nn.Module):
    table: torch.Tensor
    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.register_buffer("table", torch.ones(4))
        self.register_buffer("seen", torch.full((4,), 2.0), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x * self.table + self.seen


def test_buffers_of_a_built_model(tmp_path: Path) -> None:
    manager = flextensor.get_offload_manager()
    manager.set_config(CONFIG)
    model = Buffered()
    model.table *= 3
    x = torch.rand(2, 4)
    expected = model(x)
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    manager.offload(model)
    for _ in range(3):
        model(x)
    manager.save_profile(tmp_path)
    manager.release()
    built = flextensor.load_model_from_profile(manager, tmp_path, Buffered, buffer_device="cpu")
    assert_same(built(x), expected)
    with pytest.raises(OffloadError, match="no weights"):
        flextensor.load_model_from_profile(manager, tmp_path, Buffered, (), tmp_path.parent)


@pytest.mark.parametrize("passes", [0, 1, 2, 4])
def test_release_without_the_values(passes: int) -> None:
    model: Any = stack()
    model.layers[0].up.weight.scale = torch.ones(3)
    model.register_buffer("table", torch.ones(2))
    attributes = snapshot(model)["attributes"]
    storages = [weakref.ref(p.untyped_storage()) for p in model.parameters()]
    flextensor.offload(model, CONFIG)
    for _ in range(passes):
        model(IDS)
    flextensor.release(preserve_model=False)
    assert not any(p.numel() for p in model.parameters())
    assert not model.layers[0].up.weight.scale.numel()
    assert model.table.tolist() == [1, 1]
    assert not any(storage() for storage in storages)
    assert snapshot(model)["attributes"] == attributes
    assert flextensor.get_offload_manager().phase is Phase.NOT_INITIALIZED
    flextensor.release(preserve_model=False)


def test_released_without_the_values_disk_weights_stay_where_they_are(tmp_path: Path) -> None:
    model = stack()
    expected = model(IDS)
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    lazy = open_from_disk(stack, tmp_path)
    manager = OffloadManager(device=HostDevice())
    manager.offload(lazy, CONFIG)
    for _ in range(4):
        lazy(IDS)
    manager.release(preserve_model=False)
    assert_same(lazy(IDS), expected)


def test_a_replay_that_is_told_twice_counts_once() -> None:
    model = flextensor.offload(stack(), CONFIG.model_copy(update={"profiling_iters": 3}))
    manager = flextensor.get_offload_manager()
    for generation in (0, 0, 1, 1, 0):
        flextensor.update_state(replay_generation=generation)
    assert manager.iters_before_inference == 1
    flextensor.update_state()
    assert manager.phase.name == "INFERENCE"
    flextensor.release()
    flextensor.offload(model, CONFIG)
    flextensor.update_state(replay_generation=0)
    assert manager.phase.name == "PROFILING"


def test_the_device_is_told() -> None:
    device = HostDevice()
    assert OffloadManager(device=device).device is device
    manager = flextensor.get_offload_manager()
    with pytest.raises(OffloadError, match="no device yet"):
        _ = manager.device
    flextensor.offload(stack(), CONFIG)
    assert manager.device.torch_device == next(iter(stack().parameters())).device
    assert tensors_of(manager)._device is manager.device
