"""Configurations chosen from specs and from structure."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from modelopt_lite.errors import StrategyComputeError
from modelopt_lite.offload.auto import OffloadPlan, auto_config, plan_offload
from modelopt_lite.offload.device import HostDevice
from modelopt_lite.offload.manager import OffloadManager

DEVICE = HostDevice(1 << 30)


def fits(plan: OffloadPlan) -> bool:
    assert plan.budget is not None
    blocks = 1 if any("one block" in note for note in plan.notes) else 2
    return plan.resident_bytes + blocks * max(plan.units.values()) <= plan.budget


def total(model: nn.Module) -> int:
    tensors = [*model.parameters(), *model.buffers()]
    return sum(t.numel() * t.element_size() for t in tensors)


def test_layers_of_a_known_model_are_the_units(build_tiny: Any) -> None:
    model, _ = build_tiny("llama")
    plan = plan_offload(model)
    assert plan.has_spec
    assert plan.model_type == "llama"
    assert plan.config.include_patterns == ["class:LlamaDecoderLayer"]
    assert plan.config.max_gpu_mem_fraction is None
    assert list(plan.units) == [f"model.layers.{i}" for i in range(3)]
    assert {"model.embed_tokens", "lm_head", "model.norm"} < set(plan.resident)
    assert "model.layers.0.input_layernorm" in plan.resident
    assert plan.unit_bytes + plan.resident_bytes == total(model)
    assert (plan.moe_blocks, plan.ep_bytes, plan.expert_groups) == ({}, {}, ())
    assert plan.notes == ()
    assert auto_config(model, "llama") == plan.config


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3", "gpt_oss", "llama4_text", "jamba"])
def test_plans_of_moe_models_account_for_every_byte(build_tiny: Any, name: str) -> None:
    model, _ = build_tiny(name)
    plan = plan_offload(model)
    assert plan.unit_bytes + plan.resident_bytes == total(model)
    assert set(plan.moe_blocks.values()) == {4}
    if plan.ep_bytes:
        assert list(plan.ep_bytes) == [1, 2, 4]
        assert plan.ep_bytes[1] > plan.ep_bytes[2] > plan.ep_bytes[4]
    assert plan.has_spec or any("no spec" in note for note in plan.notes)
    assert any("gate" in path or "router" in path for path in plan.resident)


def test_the_plan_runs(build_tiny: Any, forward: Any, batches: list[Tensor]) -> None:
    for name in ("llama_tied", "qwen3_moe"):
        model, _ = build_tiny(name)
        expected = forward(name, model, batches[0])
        device = HostDevice()
        manager = OffloadManager(device=device)
        config = auto_config(model).model_copy(update={"profiling_iters": 1})
        manager.offload(model, config)
        with torch.no_grad():
            for _ in range(4):
                assert torch.equal(forward(name, model, batches[0]), expected)
        manager.release()
        device.close()


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(16, 64)
        self.down = nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.down(self.up(x))
        return made


class StrangeMoE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(16, 6)
        self.experts = nn.ModuleList(Expert() for _ in range(6))
        self.shared_expert = Expert()

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.shared_expert(x) + sum(expert(x) for expert in self.experts)
        return made


class StrangeLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.attention = nn.Linear(16, 16)
        self.ffn = StrangeMoE()

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = x + self.ffn(self.attention(self.norm(x)))
        return made


class Strange(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(300, 16)
        self.stack = nn.ModuleList(StrangeLayer() for _ in range(4))
        self.head = nn.Linear(16, 300)


def strange() -> Strange:
    with torch.device("meta"):
        return Strange()


def test_a_model_without_a_spec_goes_by_structure_and_says_so() -> None:
    plan = plan_offload(strange(), "strange")
    assert not plan.has_spec
    assert plan.config.include_patterns == ["class:StrangeLayer"]
    assert plan.notes[0].startswith("model type 'strange' has no spec; its 4 layers")
    assert "4 MoE blocks" in plan.notes[1]
    assert set(plan.moe_blocks.values()) == {6}
    assert list(plan.ep_bytes) == [1, 2, 3, 6]
    assert "stack.0.ffn.gate" in plan.resident
    assert "stack.0.ffn.shared_expert.up" in plan.resident
    assert "stack.3.norm" in plan.resident


def test_what_stays_shrinks_with_the_budget() -> None:
    model = strange()
    everything = total(model)
    last = None
    smallest = 0
    for percent in range(100, 0, -1):
        try:
            plan = plan_offload(model, budget=everything * percent // 100, device=DEVICE)
        except StrategyComputeError as error:
            smallest = error.smallest_budget or 0
            break
        assert fits(plan)
        assert plan.config.max_gpu_mem_fraction == pytest.approx(plan.budget / (1 << 30))  # type: ignore[operator]
        assert last is None or plan.resident_bytes <= last.resident_bytes or plan.expert_groups
        last = plan
    assert last is not None
    assert last.expert_groups
    assert smallest
    assert fits(plan_offload(model, budget=smallest, device=DEVICE))
    with pytest.raises(StrategyComputeError, match="the least that this model"):
        plan_offload(model, budget=smallest - 1, device=DEVICE)


def test_blocks_that_exceed_the_budget_are_split_into_groups_of_experts() -> None:
    model = strange()
    layer = total(model.stack[0])
    outside = total(model.embed) + total(model.head)
    plan = plan_offload(model, budget=outside + layer, device=DEVICE)
    assert plan.expert_groups
    in_groups = [path for group in plan.expert_groups for path in group.experts]
    assert in_groups == [f"stack.{i}.ffn.experts.{j}" for i in range(4) for j in range(6)]
    assert set(in_groups) <= set(plan.units)
    assert all(g.nbytes + plan.resident_bytes <= plan.budget for g in plan.expert_groups)  # type: ignore[operator]
    assert any("split" in note for note in plan.notes)


def test_stacked_experts_are_said_to_come_in_by_groups(build_tiny: Any) -> None:
    model, _ = build_tiny("qwen3_moe")
    if hasattr(model.model.layers[0].mlp.experts, "__len__"):
        pytest.skip("this transformers has a module for each expert")
    with pytest.raises(StrategyComputeError, match="largest part") as caught:
        plan_offload(model, budget=1, device=DEVICE)
    smallest = caught.value.smallest_budget
    assert smallest is not None
    plan = plan_offload(model, budget=smallest, device=DEVICE)
    assert any("stacked experts come in by groups" in note for note in plan.notes)
    assert all(g.nbytes + plan.resident_bytes <= smallest for g in plan.expert_groups)
    assert {len(g.experts) for g in plan.expert_groups} == {1}


def test_a_model_without_layers_is_offloaded_module_by_module() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    plan = plan_offload(model)
    assert plan.config.include_patterns == ["*"]
    assert list(plan.units) == ["0", "2"]
    assert "no list of modules" in plan.notes[0]


class Wide(nn.Module):
    """Layers large enough for strategies to move each tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(300, 300) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize("spare", [0, 200_000, 10_000_000])
def test_the_smallest_budget_is_one_that_the_runtime_can_keep(spare: int) -> None:
    model, x = Wide().requires_grad_(False), torch.ones(2, 300)
    with pytest.raises(StrategyComputeError) as caught:
        plan_offload(model, budget=1, device=DEVICE)
    budget = (caught.value.smallest_budget or 0) + spare
    device = HostDevice(1 << 30)
    config = auto_config(model, budget=budget, device=device)
    expected = model(x)
    manager = OffloadManager(device=device)
    manager.offload(model, config.model_copy(update={"profiling_iters": 3}))
    for _ in range(6):
        assert torch.equal(model(x), expected)
    assert manager.get_gpu_memory_usage().total_bytes <= budget
    manager.release()
