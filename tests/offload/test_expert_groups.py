"""Stacked experts that exceed the budget come in by groups, bit-equal to the model in memory."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor, nn

from modelopt_lite.build import quiet_transformers
from modelopt_lite.errors import OffloadError
from modelopt_lite.offload.auto import plan_offload
from modelopt_lite.offload.config import OffloadConfig
from modelopt_lite.offload.device import HostDevice
from modelopt_lite.offload.disk import disk_weights, open_from_disk
from modelopt_lite.offload.manager import OffloadManager, Phase
from modelopt_lite.offload.simdevice import SimDevice

WIDTH, EXPERTS = 128, 6
IDS = torch.arange(1, 15).reshape(2, 7)
FIELDS: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": WIDTH,
    "intermediate_size": WIDTH,
    "moe_intermediate_size": WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": EXPERTS,
    "num_local_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "pad_token_id": 0,
}


def build(model_type: str, implementation: str = "eager") -> Any:
    torch.manual_seed(5)
    with quiet_transformers():
        config = transformers.AutoConfig.for_model(model_type, **FIELDS)
        model: Any = transformers.AutoModelForCausalLM.from_config(
            config, experts_implementation=implementation
        )
    for parameter in model.parameters():  # some rest on meta's defaults: zeros and ones
        parameter.data.normal_(0, 0.05)
    return model.eval().requires_grad_(False)


def run(model: Any) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(input_ids=IDS, use_cache=False).logits
    return found


def layer_bytes(model: Any) -> int:
    return sum(p.nbytes for p in model.model.layers[0].parameters())


def whole_bytes(model: Any) -> int:
    return sum(p.nbytes for p in model.parameters())


@contextmanager
def offloaded(
    model: Any, device: Any, includes: list[str], **fields: Any
) -> Iterator[OffloadManager]:
    manager = OffloadManager(device=device)
    if isinstance(device, SimDevice):
        manager.on_compute = lambda label: device.compute(label, 1.0)
    config = OffloadConfig(
        include_patterns=includes, profiling_iters=2, max_gpu_mem_fraction=1.0, **fields
    )
    manager.offload(model, config)
    try:
        yield manager
    finally:
        manager.release()


def small(model: Any) -> int:
    """A budget that no whole layer's experts fit into beside what stays."""
    outside = whole_bytes(model) - 2 * layer_bytes(model)
    return int(outside + 0.75 * layer_bytes(model))


@pytest.mark.parametrize("model_type", ["qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize("device", [HostDevice, SimDevice])
@pytest.mark.parametrize("includes", [["model.layers.*"], ["model.layers.*.mlp.experts"]])
def test_outputs_are_bit_equal_and_weights_true_in_all_phases(
    model_type: str, device: Any, includes: list[str]
) -> None:
    reference = build(model_type)
    model = copy.deepcopy(reference)
    expected, state = run(reference), reference.state_dict()
    budget = small(model)
    with offloaded(model, device(budget), includes) as manager:
        while True:
            assert torch.equal(run(model), expected)
            assert all(torch.equal(v, state[n]) for n, v in model.state_dict().items())
            if manager.phase is Phase.INFERENCE:
                break
        assert torch.equal(run(model), expected)
        tensors = manager.get_tensor_manager()
        assert tensors is not None
        groups = [label for label in tensors.labels if "[" in label]
        assert len(groups) >= 4
        assert sum(tensors.moves(label) for label in groups) >= 2
        assert tensors.ledger.peak("device") <= budget
    assert torch.equal(run(model), expected)
    assert all(torch.equal(v, state[n]) for n, v in model.state_dict().items())


@pytest.mark.parametrize("mode", ["view", "torch_function"])
@pytest.mark.parametrize("fused", [True, False])
def test_rows_are_read_from_disk(
    tmp_path: Path, mode: Any, fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("modelopt_lite.offload.diskblock.WORTH_A_REQUEST", 1 << 16)
    reference = build("qwen3_moe")
    expected = run(reference)
    if fused:
        save_file(reference.state_dict(), tmp_path / "model.safetensors")
        reference.config.save_pretrained(tmp_path)
    else:
        reference.save_pretrained(tmp_path)  # one tensor for each expert's matrix
    cls = transformers.Qwen3MoeForCausalLM
    model: Any = open_from_disk(cls, tmp_path, dtype=torch.float32)
    model.set_experts_implementation("eager")
    weights = disk_weights(model)
    assert weights is not None
    weights.read_uncached()
    transfer: Any = "strategy" if mode == "torch_function" else "allocation_block_transfer"
    device = HostDevice(small(reference))
    fields = {"profile_mode": mode, "transfer_mode": transfer}
    with offloaded(model, device, ["model.layers.*"], **fields) as manager:
        for _ in range(6):
            assert torch.equal(run(model), expected)
        assert manager.phase is Phase.INFERENCE
        device.synchronize()
        before = weights.source.bytes_read
        assert torch.equal(run(model), expected)
        device.synchronize()
        read = weights.source.bytes_read - before
        assert 0 < read <= 1.5 * whole_bytes(reference)  # rows, and not whole tensors for each
    assert torch.equal(run(model), expected)


def test_without_need_nothing_is_split() -> None:
    model = build("qwen3_moe")
    with offloaded(model, HostDevice(4 * whole_bytes(model)), ["model.layers.*"]) as manager:
        tensors = manager.get_tensor_manager()
        assert tensors is not None
        assert not [label for label in tensors.labels if "[" in label]


def test_experts_that_are_computed_at_once_stay_whole_where_one_block_fits() -> None:
    model = build("qwen3_moe", "batched_mm")
    expected = run(model)
    outside = whole_bytes(model) - 2 * layer_bytes(model)
    device = HostDevice(int(outside + 1.5 * layer_bytes(model)))
    with offloaded(model, device, ["model.layers.*"]) as manager:
        for _ in range(5):
            assert torch.equal(run(model), expected)
        assert manager.phase is Phase.INFERENCE
        assert not [x for x in manager.get_tensor_manager().labels if "[" in x]  # type: ignore[union-attr]


def test_code_that_reads_all_experts_at_once_is_refused() -> None:
    model = build("qwen3_moe", "batched_mm")
    with (
        offloaded(model, HostDevice(small(model)), ["model.layers.*"]),
        pytest.raises(OffloadError, match="set_experts_implementation"),
    ):
        run(model)


class Hoarder(nn.Module):
    """Picks all its experts before it computes with any."""

    def __init__(self) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(EXPERTS, 2 * WIDTH, WIDTH) / 16)

    def forward(self, x: Tensor) -> Tensor:
        picked = [self.w1[index] for index in range(EXPERTS)]
        made: Tensor = sum((x @ w.T).relu().sum(-1, keepdim=True) for w in picked) + x
        return made


class HoarderMoE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS)
        self.experts = Hoarder()

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.experts(x) * self.gate(x).sum(-1, keepdim=True)
        return made


@pytest.mark.parametrize("device", [HostDevice, SimDevice])
def test_experts_that_are_kept_while_others_come_in_keep_their_values(device: Any) -> None:
    torch.manual_seed(7)
    blocks = [HoarderMoE(), HoarderMoE()]
    model = nn.Sequential(*blocks).eval().requires_grad_(False)
    x = torch.randn(3, WIDTH)
    expected = model(x)
    budget = int(1.6 * blocks[0].experts.w1.nbytes)
    with offloaded(model, device(budget), ["*"]) as manager:
        for _ in range(6):
            with torch.no_grad():
                assert torch.equal(model(x), expected)
        assert manager.phase is Phase.INFERENCE
        tensors = manager.get_tensor_manager()
        assert tensors is not None
        assert [label for label in tensors.labels if "[" in label]


def test_auto_splits_stacked_experts_and_tells_the_groups() -> None:
    model = build("qwen3_moe")
    expected = run(model)
    outside = whole_bytes(model) - 2 * layer_bytes(model)
    device = HostDevice(int(outside + 0.6 * layer_bytes(model)))
    plan = plan_offload(model, budget=device.capacity, device=device)
    assert len(plan.expert_groups) >= 4
    rows = [expert for group in plan.expert_groups for expert in group.experts]
    assert rows[: EXPERTS + 1] == [
        *(f"model.layers.0.mlp.experts[{row}]" for row in range(EXPERTS)),
        "model.layers.1.mlp.experts[0]",
    ]
    assert any("set_experts_implementation" in note for note in plan.notes)
    manager = OffloadManager(device=device)
    manager.offload(model, plan.config.model_copy(update={"profiling_iters": 2}))
    for _ in range(5):
        assert torch.equal(run(model), expected)
    tensors = manager.get_tensor_manager()
    assert tensors is not None
    labels = {label for label in tensors.labels if "[" in label}
    assert len(labels) == len(plan.expert_groups)
    assert tensors.ledger.peak("device") <= plan.budget  # type: ignore[operator]
    manager.release()


@pytest.mark.parametrize("device", [HostDevice, SimDevice])
def test_exceptions_new_plans_and_new_weights(device: Any) -> None:
    reference = build("qwen3_moe")
    model = copy.deepcopy(reference)
    failing = [False]
    plain = model.model.layers[1].mlp.experts.act_fn

    def activate(x: Tensor) -> Tensor:
        if failing[0]:
            raise ValueError("on purpose")  # while a group is in
        made: Tensor = plain(x)
        return made

    model.model.layers[1].mlp.experts.act_fn = Activation(activate)
    with offloaded(model, device(small(model)), ["model.layers.*"]) as manager:
        for index in range(9):
            failing[0] = True
            with pytest.raises(ValueError, match="on purpose"):
                run(model)
            failing[0] = False
            assert torch.equal(run(model), run(reference))
            new = {n: torch.randn_like(v) / 16 for n, v in reference.state_dict().items()}
            reference.load_state_dict(new)
            model.load_state_dict(new)
            if index == 5:
                assert manager.request_strategy_replan()
        assert manager.phase is Phase.INFERENCE
        assert all(torch.equal(v, new[n]) for n, v in model.state_dict().items())
    assert all(torch.equal(v, new[n]) for n, v in model.state_dict().items())


class Activation(nn.Module):
    def __init__(self, call: Any) -> None:
        super().__init__()
        self.call = call

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.call(x)
        return made


def test_a_profile_knows_groups(tmp_path: Path) -> None:
    model = build("qwen3_moe")
    expected = run(model)
    with offloaded(model, HostDevice(small(model)), ["model.layers.*"]) as manager:
        while manager.phase is not Phase.INFERENCE:
            run(model)
        manager.save_profile(tmp_path)
        labels = manager.get_tensor_manager().labels  # type: ignore[union-attr]
        config = manager.config
    manager = OffloadManager(device=HostDevice(small(model)))
    manager.offload_from_profile(model, tmp_path, config)
    assert manager.phase is Phase.INFERENCE
    assert set(manager.get_tensor_manager().labels) == set(labels)  # type: ignore[union-attr]
    for _ in range(2):
        assert torch.equal(run(model), expected)
    manager.release(preserve_model=False)
    assert not sum(p.numel() for p in model.parameters())
