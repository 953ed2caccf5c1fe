"""The nine faults for which the runtime that made these names is known, as tests that pass here.

1. Tied weights give wrong outputs in block mode.    6. Parameters in no unit are nowhere.
2. Any order but the profiled one fails.             7. A wrong transfer_mode surfaces late.
3. state_dict() in INFERENCE returns slots.          8. Copy times are kept by shape, not bytes.
4. release() leaves children patched.                9. A profile of another model is accepted.
5. A container becomes a unit that never runs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import (
    QUICK,
    Everything,
    Stack,
    assert_same,
    check_passes,
    offloaded,
    snapshot,
    tensors_of,
)
from torch import nn

from modelopt_lite.errors import OffloadConfigError, OffloadError
from modelopt_lite.offload import HostDevice, OffloadConfig, OffloadManager
from modelopt_lite.offload.diagnostics import unit_rows
from modelopt_lite.offload.simdevice import SimDevice, gigabytes_per_second

IDS = torch.arange(10).view(2, 5)
BLOCK_MODES = ["allocation_block_transfer", "raw_block_transfer"]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("mode", BLOCK_MODES)
@pytest.mark.parametrize(
    ("tied", "patterns"),
    [
        ("embeddings", {"include_patterns": ["embed", "layers.*"]}),  # the head is in no unit
        ("embeddings", {"include_patterns": ["*"], "exclude_patterns": ["head"]}),
        ("embeddings", {"include_patterns": ["embed", "layers.*", "head"]}),
        ("middle", {"include_patterns": ["layers.*"]}),
        ("three", {"include_patterns": ["*"]}),
    ],
)
def test_1_tied_weights_in_block_modes(mode: str, tied: str, patterns: dict[str, Any]) -> None:
    model = Stack(tied=tied)
    for device in ("host", "sim"):
        check_passes(
            model,
            lambda: model(IDS),
            device=device,
            load_strategy=Everything(),
            transfer_mode=mode,
            **patterns,
        )


@pytest.mark.parametrize("mode", BLOCK_MODES)
@pytest.mark.parametrize("blocks", [1, 2, 4])
@pytest.mark.parametrize(
    "order",
    [[0, 2, 1, 3, 4], [0, 1, 3, 4], [0, 1, 1, 2, 3, 4], [2, 3, 4], [0, 1, 2, 3, 4] * 2],
    ids=["swapped", "skipped", "repeated", "from a later one", "twice"],
)
def test_2_units_in_another_order(mode: str, blocks: int, order: list[int]) -> None:
    model = Stack(5)
    with torch.no_grad():
        profiled = model(IDS)
        model.order = order
        expected = model(IDS)
        model.order = None
        strategy = Everything(blocks)
        with offloaded(model, load_strategy=strategy, transfer_mode=mode) as manager:
            for _ in range(4):
                model(IDS)
            assert manager.phase.name == "INFERENCE"
            for model.order, values in ((order, expected), (None, profiled)) * 3:
                assert_same(model(IDS), values)


def test_2_an_order_never_seen_is_slower_and_right() -> None:
    model = Stack(4)
    with torch.no_grad():
        model.order = [3, 1]
        expected = model(IDS)
        model.order = None
        with offloaded(model, load_strategy=Everything(2)) as manager:
            for _ in range(5):
                model(IDS)
            counts = tensors_of(manager).loader.counts
            misses = counts.misses
            model(IDS)
            assert counts.misses == misses
            model.order = [3, 1]
            assert_same(model(IDS), expected)
            assert counts.misses > misses


def test_3_state_dict_in_inference(tmp_path: Path) -> None:
    model = Stack(10)
    values = {name: value.clone() for name, value in model.state_dict().items()}
    seen: list[Any] = []
    # In the middle of a pass, too: slots hold some weights, and others wait for theirs.
    model.norm.register_forward_pre_hook(lambda *_: seen.append(clones(model)))
    with torch.no_grad(), offloaded(model, "host", load_strategy=Everything(4)) as manager:
        for _ in range(6):
            model(IDS)
        assert manager.phase.name == "INFERENCE"
        torch.save(model.state_dict(), tmp_path / "state.pt")
        assert_same(clones(model), values)
    assert len(seen) == 6
    for state in seen:
        assert_same(state, values)
    assert_same(dict(torch.load(tmp_path / "state.pt")), values)


def clones(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("profile_mode", ["getter", "view", "torch_function"])
def test_4_release_after_a_getter_profile(profile_mode: str) -> None:
    model = Stack(4)
    with torch.no_grad():
        expected = model(IDS)
        before = snapshot(model)
        with offloaded(
            model,
            load_strategy=Everything(),
            profile_mode=profile_mode,
            transfer_mode="strategy",
        ):
            for _ in range(5):
                model(IDS)
        assert_same(snapshot(model), before)
        assert_same(model(IDS), expected)
        assert not any("_ft_offload_name" in vars(module) for module in model.modules())


def test_5_a_container_is_streamed_through_its_children() -> None:
    model = Stack(3)
    with offloaded(model, include_patterns=["*"], load_strategy=Everything()) as manager:
        assert [path for path, _ in manager.offload_units()] == [
            *("embed", "layers.0", "layers.1", "layers.2", "norm", "head"),
        ]
        for _ in range(5):
            model(IDS)
        assert tensors_of(manager).loader.counts.copies > 0


def test_6_parameters_in_no_unit_are_resident() -> None:
    class Flat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.rand(4))
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x)
            return x * self.scale

    model = Flat()
    with offloaded(model, load_strategy=Everything()) as manager:
        tensors = tensors_of(manager)
        assert tensors.resident_bytes == 16
        for _ in range(5):
            model(torch.rand(2, 4))
        assert manager.resident_units() == ()


def test_7_a_wrong_transfer_mode_is_refused_at_once() -> None:
    mode: Any = "allocation_block"
    with pytest.raises(OffloadConfigError, match="transfer_mode"):
        OffloadConfig(transfer_mode=mode)


def test_8_copy_times_know_bytes_not_shapes() -> None:
    class Cast(nn.Module):
        def __init__(self, dtype: torch.dtype) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(256, 256).to(dtype), requires_grad=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ self.weight.float() / 256

    dtypes = (torch.float32, torch.int8, torch.float16, torch.int8)
    model = nn.Sequential(*(Cast(dtype) for dtype in dtypes))
    device = SimDevice(1 << 22, curve=gigabytes_per_second(0.001))  # 1 us a byte
    with offloaded(model, device, load_strategy=Everything()) as manager:
        for _ in range(5):
            model(torch.ones(2, 256))
        times = [row.copy_ms for row in unit_rows(manager)]
    assert times == pytest.approx([256 * 256 * dtype.itemsize / 1e3 for dtype in dtypes], rel=0.02)


def test_9_a_profile_of_another_model(tmp_path: Path) -> None:
    manager = OffloadManager(device=HostDevice())
    five, six = Stack(5), Stack(6)
    config = OffloadConfig(**QUICK, load_strategy=Everything())
    manager.offload(five, config)
    for _ in range(3):
        five(IDS)
    manager.save_profile(tmp_path)
    manager.release()
    with pytest.raises(OffloadError, match=r"'layers\.5' is missing in the profile"):
        manager.offload_from_profile(six, tmp_path, config)
    assert manager.model is None
