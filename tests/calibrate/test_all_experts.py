"""Every expert sees every token, and the model computes what it always does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from modelopt_lite.build import eager_experts
from modelopt_lite.calibrate.all_experts import calibrate_all_experts
from modelopt_lite.calibrate.observe import InputStats, InputWatch, Site
from modelopt_lite.errors import CalibrationError

BuildModel = Callable[..., Any]
BATCHES = [torch.arange(14).reshape(2, 7), torch.arange(20, 25).reshape(1, 5)]
TOKENS = 19
MODELS = ["qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss"]


def expert_entries(model: nn.Module) -> dict[str, Tensor]:
    return {
        name: parameter
        for name, parameter in model.named_parameters()
        if ".experts." in name and parameter.ndim > 1 and "bias" not in name
    }


def observe(model: Any, model_type: str, *, all_experts: bool) -> tuple[list[Tensor], InputStats]:
    stats = InputStats()
    watch = InputWatch(stats.visit)
    watch.watch(expert_entries(model))
    with eager_experts(model), torch.inference_mode():
        if not all_experts:
            with watch:
                return [model(ids, use_cache=False).logits for ids in BATCHES], stats
        with calibrate_all_experts(model, model_type, watch), watch:
            return [model(ids, use_cache=False).logits for ids in BATCHES], stats


def sites(model: nn.Module) -> list[Site]:
    found: list[Site] = []
    for name, parameter in expert_entries(model).items():
        experts = range(len(parameter)) if parameter.ndim == 3 else [None]
        found += [Site(name, expert) for expert in experts]
    return found


@pytest.mark.parametrize("model_type", MODELS)
def test_every_expert_sees_every_token_once(model_type: str, build_model: BuildModel) -> None:
    model = build_model(model_type)
    plain, usual = observe(model, model_type, all_experts=False)
    logits, stats = observe(model, model_type, all_experts=True)
    assert all(map(torch.equal, logits, plain))
    assert set(stats.rows) == set(sites(model))
    assert set(stats.rows.values()) == {TOKENS}
    assert min(usual.rows.get(site, 0) for site in sites(model)) < TOKENS
    for site, amax in usual.amax.items():
        # One more product of the same rows may round otherwise; the rows seen are a superset.
        assert stats.amax[site] >= amax * (1 - 1e-5), site


@pytest.mark.parametrize("model_type", ["qwen3_moe", "gpt_oss"])
def test_hooks_and_the_watch_are_left_as_they_were(
    model_type: str, build_model: BuildModel
) -> None:
    model = build_model(model_type)
    watch = InputWatch(lambda site, x, batched: None)

    def hooks() -> int:
        return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())

    before = hooks()
    with calibrate_all_experts(model, model_type, watch):
        assert hooks() > before
    assert hooks() == before


@pytest.mark.parametrize("model_type", ["qwen3_moe", "gpt_oss"])
def test_an_error_inside_the_block_resumes_the_watch(
    model_type: str, build_model: BuildModel
) -> None:
    model = build_model(model_type)
    experts = model.model.layers[0].mlp.experts
    part = experts[0] if isinstance(experts, nn.ModuleList) else experts
    stats = InputStats()
    watch = InputWatch(stats.visit)
    watch.watch(expert_entries(model))
    with eager_experts(model), torch.inference_mode(), watch:
        with calibrate_all_experts(model, model_type, watch):
            handle = part.register_forward_pre_hook(fail_at_second_call())
            with pytest.raises(RuntimeError, match="broken"):
                observe_twice(model)
            handle.remove()
        stats.rows.clear()
        model(BATCHES[0], use_cache=False)
    assert sum(stats.rows.values()) > 0  # not paused for ever


def observe_twice(model: Any) -> None:
    for _ in range(2):
        model(BATCHES[0], use_cache=False)


def fail_at_second_call() -> Callable[..., None]:
    calls: list[int] = []

    def hook(module: nn.Module, args: Any) -> None:
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("broken")

    return hook


def test_a_dense_model(build_model: BuildModel) -> None:
    watch = InputWatch(lambda site, x, batched: None)
    with pytest.raises(CalibrationError, match="no MoE block"):
        with calibrate_all_experts(build_model("llama"), "llama", watch):
            pass


def test_experts_that_cannot_be_called(build_model: BuildModel) -> None:
    """llama4 repeats its tokens itself and gives its experts nothing else."""
    model = build_model("llama4_text")
    watch = InputWatch(lambda site, x, batched: None)
    with calibrate_all_experts(model, "llama4_text", watch):
        with pytest.raises(CalibrationError, match="leave moe_calibrate_all_experts out"):
            model(BATCHES[0], use_cache=False)


class Expert(nn.Module):
    """One expert."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.up(x)
        return y


class MixtralSparseMoeBlock(nn.Module):
    """A block that is called by keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(4, 2)
        self.experts = nn.ModuleList(Expert() for _ in range(2))

    def forward(self, hidden_states: Tensor) -> Tensor:
        y: Tensor = self.experts[0](hidden_states)
        return y


def test_a_block_called_by_keyword() -> None:
    model = nn.ModuleDict({"mlp": MixtralSparseMoeBlock()})
    stats = InputStats()
    watch = InputWatch(stats.visit)
    watch.watch(dict(model.named_parameters()))
    x = torch.randn(2, 3, 4)
    with calibrate_all_experts(model, "mixtral", watch), watch:
        y = model["mlp"](hidden_states=x)
    assert torch.equal(y, model["mlp"](x))
    assert stats.rows == {Site(f"mlp.experts.{e}.up.weight"): 6 for e in range(2)}
