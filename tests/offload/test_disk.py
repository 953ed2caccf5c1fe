"""The disk tier: mapped weights, weights of another form, units read straight into their blocks."""

from __future__ import annotations

import copy
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor, nn

from modelopt_lite.build import quiet_transformers
from modelopt_lite.checkpoint.uncached import ALIGN, FLAG
from modelopt_lite.errors import CheckpointError, OffloadError
from modelopt_lite.offload.config import OffloadConfig
from modelopt_lite.offload.device import HostDevice
from modelopt_lite.offload.disk import DiskWeights, disk_weights, open_from_disk
from modelopt_lite.offload.lazyparam import LazyParameter
from modelopt_lite.offload.manager import OffloadManager, Phase
from modelopt_lite.offload.simdevice import SimDevice

WIDTH = 128  # strategies leave tensors below 0.1 MB where they are


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.a = nn.Linear(width, 2 * width)
        self.b = nn.Linear(2 * width, width)
        self.register_buffer("shift", torch.full((width,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = x + self.b(torch.relu(self.a(self.norm(x)))) + self.shift
        return made


class Tied(nn.Module):
    """A head that is the embedding, also in the file."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, WIDTH)
        self.layers = nn.ModuleList(Block(WIDTH) for _ in range(5))
        self.head = nn.Linear(WIDTH, 20, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        made: Tensor = self.head(x)
        return made


IDS = torch.arange(14).reshape(2, 7)


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, Tied]:
    """A folder with the model's weights, and the model in memory."""
    torch.manual_seed(1)
    model = Tied().eval().requires_grad_(False)
    state = {k: v for k, v in model.state_dict().items() if k != "head.weight"}
    state["layers.3.a.weight"] = state["layers.3.a.weight"].bfloat16()  # another dtype
    model.get_parameter("layers.3.a.weight").data = state["layers.3.a.weight"].float()
    save_file(state, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    return tmp_path, model


def weights_of(model: nn.Module) -> DiskWeights:
    found = disk_weights(model)
    assert found is not None
    return found


def assert_same_state(one: nn.Module, other: nn.Module) -> None:
    expected = other.state_dict()
    assert one.state_dict().keys() == expected.keys()
    for name, value in one.state_dict().items():
        assert torch.equal(value, expected[name]), name


def test_the_model_runs_and_is_saved_before_anything_is_offloaded(saved: Any) -> None:
    folder, reference = saved
    model = open_from_disk(Tied, folder)
    assert model.head.weight is model.embed.weight
    lazy = [n for n, p in model.named_parameters() if isinstance(p, LazyParameter)]
    assert lazy == ["layers.3.a.weight"]
    assert torch.equal(model(IDS), reference(IDS))
    assert_same_state(model, reference)
    assert_same_state(copy.deepcopy(model), reference)


@pytest.mark.parametrize("device", [HostDevice, lambda: SimDevice(1 << 24)])
@pytest.mark.parametrize("mode", ["view", "torch_function"])
@pytest.mark.parametrize("least_run", [0, 1 << 20])
def test_outputs_are_bit_equal_and_weights_true_in_all_phases(
    saved: Any, device: Any, mode: str, least_run: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, reference = saved
    monkeypatch.setattr("modelopt_lite.offload.diskblock.WORTH_A_REQUEST", least_run)
    monkeypatch.setattr("modelopt_lite.checkpoint.uncached.WORTH_A_REQUEST", least_run)
    model = open_from_disk(Tied, folder)
    if not least_run:
        weights_of(model).read_uncached()
    rest = {name: p.data_ptr() for name, p in model.named_parameters() if "3.a" not in name}
    with OffloadOn(device(), model, mode) as manager:
        phases = set()
        for _ in range(6):
            phases.add(manager.phase)
            with torch.no_grad():
                assert torch.equal(model(IDS), reference(IDS))
            assert_same_state(model, reference)
        assert phases == {Phase.DISCOVERY, Phase.PROFILING, Phase.INFERENCE}
        ledger = manager.get_tensor_manager().ledger  # type: ignore[union-attr]
        assert ledger.total("disk")
        assert not ledger.total("host")
    after = {name: p.data_ptr() for name, p in model.named_parameters() if "3.a" not in name}
    assert after == rest
    lazy = model.get_parameter("layers.3.a.weight")
    assert isinstance(lazy, LazyParameter)
    assert lazy.at_rest
    assert_same_state(model, reference)


class OffloadOn:
    """Offloads a model's layers; releases it at the end."""

    def __init__(self, device: Any, model: nn.Module, mode: Any = "view") -> None:
        self.manager = OffloadManager(device=device)
        self.device = device
        if isinstance(device, SimDevice):
            self.manager.on_compute = lambda label: device.compute(label, 1.0)
        transfer: Any = "strategy" if mode == "torch_function" else "allocation_block_transfer"
        config = OffloadConfig(
            include_patterns=["layers.*"],
            profiling_iters=3,
            profile_mode=mode,
            transfer_mode=transfer,
            transfer_budget_scale=1e9,
        )
        self.manager.offload(model, config)

    def __enter__(self) -> OffloadManager:
        return self.manager

    def __exit__(self, *error: object) -> None:
        self.manager.release()


def test_each_weight_is_read_once_a_pass(saved: Any) -> None:
    folder, _ = saved
    model = open_from_disk(Tied, folder)
    source = weights_of(model).source
    with OffloadOn(HostDevice(), model) as manager:
        for _ in range(5):
            model(IDS)
        assert manager.phase is Phase.INFERENCE
        plan = manager.get_tensor_manager().plan  # type: ignore[union-attr]
        assert plan is not None
        moved = {t.name for tensors in plan.offloaded.values() for t in tensors}
        assert {name.split(".")[1] for name in moved} >= {"1", "2", "3", "4"}
        manager._device.synchronize()  # type: ignore[union-attr]
        source.reads.clear()
        for _ in range(4):
            model(IDS)
        manager._device.synchronize()  # type: ignore[union-attr]
        assert set(source.reads) == moved
        assert all(3 <= count <= 5 for count in source.reads.values())  # look-ahead at both ends
        assert sum(source.reads.values()) <= 4 * len(moved) + len(moved)


WIDE = 800  # a matrix has 2.5 MB


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        pairs = ((nn.Linear(WIDE, WIDE, bias=False), nn.Linear(WIDE, WIDE)) for _ in range(4))
        self.layers = nn.ModuleList(nn.Sequential(*pair) for pair in pairs)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.skipif(not FLAG, reason="the system has no reads past the page cache")
def test_a_layer_is_read_straight_into_its_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(3)
    reference = Wide().eval().requires_grad_(False)
    save_file(reference.state_dict(), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    model = open_from_disk(Wide, tmp_path)
    weights = weights_of(model)
    weights.read_uncached()
    x = torch.randn(2, WIDE)
    asked: list[int] = []
    preadv = os.preadv

    def counted(fd: int, parts: list[memoryview], at: int) -> int:
        asked.append(len(parts[0]))
        return preadv(fd, parts, at)

    with OffloadOn(HostDevice(), model) as manager:
        while manager.phase is not Phase.INFERENCE:
            assert torch.equal(model(x), reference(x))
        tensors = manager.get_tensor_manager()
        assert tensors is not None
        assert tensors.plan is not None
        ledger = tensors.ledger
        assert ledger.total("device") <= tensors.plan.prediction.peak_bytes + tensors.resident_bytes
        manager._device.synchronize()  # type: ignore[union-attr]
        monkeypatch.setattr(os, "preadv", counted)
        assert torch.equal(model(x), reference(x))
        manager._device.synchronize()  # type: ignore[union-attr]
        moved = [cargo.nbytes for cargo in tensors._cargos.values()]
        assert len(moved) >= 3
        assert weights.source.tensors["layers.1.1.weight"].start % ALIGN  # not by chance
        if weights.source.uncached:  # type: ignore[union-attr]
            whole = [size for size in asked if size > ALIGN]
            # A request for each matrix, as a small bias lies between, and the next pass begun.
            assert 2 * len(moved) <= len(whole) <= 2 * len(moved) + 4
            assert min(whole) > WIDE * WIDE * 4 - 2 * ALIGN
    assert_same_state(model, reference)


class Untied(Tied):
    """A table of embeddings that nothing else reads."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight = nn.Parameter(torch.randn(20, WIDTH))


def test_a_table_stays_mapped_where_the_device_is_the_host(tmp_path: Path) -> None:
    torch.manual_seed(2)
    reference = Untied().eval().requires_grad_(False)
    save_file(reference.state_dict(), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    model = open_from_disk(Untied, tmp_path)
    mapped = model.embed.weight.data_ptr(), model.head.weight.data_ptr()
    with OffloadOn(HostDevice(), model) as manager:
        for _ in range(6):
            assert torch.equal(model(IDS), reference(IDS))
        assert model.embed.weight.data_ptr() == mapped[0]
        assert model.head.weight.data_ptr() != mapped[1]  # read in
        ledger = manager.get_tensor_manager().ledger  # type: ignore[union-attr]
        assert ledger.held("resident")["disk"] == model.embed.weight.nbytes
    assert_same_state(model, reference)


def test_weights_that_were_changed_in_memory_are_not_read_from_disk_again(saved: Any) -> None:
    folder, reference = saved
    model = open_from_disk(Tied, folder)
    for both in (model, reference):
        with torch.no_grad():
            both.get_parameter("layers.1.a.weight").mul_(2)
        both.get_parameter("layers.2.b.weight").data.add_(1)
        both.get_parameter("layers.4.b.weight").data = torch.ones(WIDTH, 2 * WIDTH)
    covered = weights_of(model).covers
    assert not covered(model.get_parameter("layers.1.a.weight"))
    if sys.platform == "linux":
        assert not covered(model.get_parameter("layers.2.b.weight"))
    assert not covered(model.get_parameter("layers.4.b.weight"))
    assert covered(model.get_parameter("layers.3.a.weight"))
    with OffloadOn(HostDevice(), model):
        for _ in range(6):
            assert torch.equal(model(IDS), reference(IDS))
    assert_same_state(model, reference)
    assert_same_state_of_file(folder)


def assert_same_state_of_file(folder: Path) -> None:
    fresh = open_from_disk(Tied, folder)
    assert not torch.equal(fresh.get_parameter("layers.4.b.weight"), torch.ones(WIDTH, 2 * WIDTH))


def test_a_weight_at_rest_cannot_be_changed_in_place(saved: Any) -> None:
    model = open_from_disk(Tied, saved[0])
    with pytest.raises(OffloadError, match="set its data instead"):
        model.get_parameter("layers.3.a.weight").mul_(2)


@pytest.fixture(params=["qwen3_moe", "llama"])
def transformer(request: Any, tmp_path: Path) -> Iterator[tuple[Path, Any]]:
    """A folder as save_pretrained writes it, experts one by one, and the model in memory."""
    import transformers

    fields = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "head_dim": 8,
        "vocab_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    if request.param == "qwen3_moe":
        fields |= {"moe_intermediate_size": 24, "num_experts_per_tok": 2, "num_experts": 4}
    torch.manual_seed(0)
    with quiet_transformers():
        config = transformers.AutoConfig.for_model(request.param, **fields)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        model = model.eval().requires_grad_(False)
        model.save_pretrained(tmp_path)
        config = json.loads((tmp_path / "config.json").read_text())
        config["dtype"] = "float32"
        (tmp_path / "config.json").write_text(json.dumps(config))
        yield tmp_path, model


def test_a_transformers_class_runs_from_its_folder(transformer: Any) -> None:
    folder, reference = transformer
    model = open_from_disk(type(reference), folder)
    fused = any(isinstance(p, LazyParameter) for p in model.parameters())
    has_lists = "experts.0.gate_proj" in str([n for n, _ in model.named_parameters()])
    assert fused == ("moe" in str(type(model)).lower() and not has_lists)
    ids = IDS % 60
    with torch.no_grad():
        expected = reference(input_ids=ids, use_cache=False).logits
        assert torch.equal(model(input_ids=ids, use_cache=False).logits, expected)
        manager = OffloadManager(device=HostDevice())
        manager.offload(
            model,
            OffloadConfig(
                include_patterns=["model.layers.*"], profiling_iters=2, transfer_budget_scale=1e9
            ),
        )
        at_rest = [p.reads_at_rest for p in model.parameters() if isinstance(p, LazyParameter)]
        for _ in range(6):
            assert torch.equal(model(input_ids=ids, use_cache=False).logits, expected)
        assert manager.phase is Phase.INFERENCE
        after = [p.reads_at_rest for p in model.parameters() if isinstance(p, LazyParameter)]
        assert at_rest == after
        assert_same_state(model, reference)
        manager.release()
    assert_same_state(model, reference)


def test_an_auto_class_finds_the_architecture(transformer: Any) -> None:
    folder, reference = transformer
    model = open_from_disk(transformers.AutoModelForCausalLM, folder)
    assert type(model) is type(reference)
    assert_same_state(model, reference)


def test_a_model_of_ones_own_needs_no_config(saved: Any) -> None:
    folder, reference = saved
    (folder / "config.json").unlink()
    model = open_from_disk(Tied, folder)
    assert torch.equal(model(IDS), reference(IDS))
    with pytest.raises(CheckpointError, match=r"config\.json: no such file"):
        open_from_disk(transformers.AutoModelForCausalLM, folder)
    (folder / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="has no model_type; give the class"):
        open_from_disk(transformers.AutoModelForCausalLM, folder)


def test_a_model_on_meta_is_filled_in_place(saved: Any) -> None:
    from modelopt_lite.offload.disk import parameters_on_meta

    folder, reference = saved
    with parameters_on_meta():
        model = Tied()
    assert model.embed.weight.is_meta
    assert open_from_disk(model, folder) is model
    assert_same_state(model, reference)
    with torch.device("meta"):
        bare = Tied()
    assert_same_state(open_from_disk(bare, folder), reference)  # the file has its buffers


def test_what_the_checkpoint_lacks_is_an_error(saved: Any) -> None:
    folder, model = saved
    state = {k: v.clone() for k, v in model.state_dict().items() if k not in ("head.weight",)}
    del state["layers.2.a.bias"]
    save_file(state, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"layers\.2\.a\.bias"):
        open_from_disk(Tied, folder)


def test_a_file_that_changes_while_it_is_read_is_an_error(saved: Any) -> None:
    folder, _ = saved
    model = open_from_disk(Tied, folder)
    with OffloadOn(HostDevice(), model):
        model(IDS)
        with (folder / "model.safetensors").open("ab") as file:
            file.write(b"\0")
        with pytest.raises(CheckpointError, match="changed since"):
            model(IDS)


def test_weights_that_a_unit_changes_keep_the_change_and_the_file_does_not(saved: Any) -> None:
    folder, reference = saved

    def double(module: nn.Module, args: Any, output: Any) -> None:
        with torch.no_grad():
            module.get_parameter("a.weight").mul_(1.5)

    model = open_from_disk(Tied, folder)
    for both in (model, reference):
        for index in (2, 3):
            both.get_submodule(f"layers.{index}.norm").register_forward_hook(
                lambda module, args, output, layer=both.layers[index]: double(layer, args, output)
            )
    with OffloadOn(HostDevice(), model):
        for _ in range(7):
            assert torch.equal(model(IDS), reference(IDS))
            assert_same_state(model, reference)
    assert_same_state(model, reference)
    assert_same_state_of_file(folder)
