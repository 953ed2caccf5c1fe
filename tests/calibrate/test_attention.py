"""Keys and values that attention layers attend to, against hooks of another kind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS as TABLE

from modelopt_lite.calibrate.attention import watch_attention
from modelopt_lite.calibrate.cache import CacheStats

BuildModel = Callable[..., Any]
IDS = torch.arange(18).reshape(2, 9)


def run(model: Any, ids: Tensor = IDS) -> Tensor:
    with torch.inference_mode():
        logits: Tensor = model(ids, use_cache=False).logits
    return logits


def largest(tensor: Tensor) -> float:
    return float(tensor.abs().max())


@pytest.mark.parametrize("model_type", ["llama", "gemma3_text", "deepseek_v3"])
def test_as_the_kernel_sees_them(
    model_type: str, build_model: BuildModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build_model(model_type, attn_implementation="sdpa")
    plain = run(model)
    kernel = functional.scaled_dot_product_attention
    calls: list[tuple[float, float]] = []

    def spy(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        calls.append((largest(key), largest(value)))
        return kernel(query, key, value, *args, **kwargs)

    monkeypatch.setattr(functional, "scaled_dot_product_attention", spy)
    stats = CacheStats()
    with watch_attention(model, stats.visit):
        assert torch.equal(run(model), plain)
        run(model, IDS[:, :3])
    names = [f"model.layers.{index}.self_attn" for index in range(2)]
    assert list(stats.key) == list(stats.value) == names
    for index, name in enumerate(names):
        own = calls[index::2]
        assert len(own) == 2
        assert float(stats.key[name].amax) == max(key for key, _ in own)
        assert float(stats.value[name].amax) == max(value for _, value in own)


@pytest.mark.parametrize("model_type", ["llama", "gpt_oss", "qwen3_moe"])
def test_eager_attention(model_type: str, build_model: BuildModel) -> None:
    """The eager function is in no table; gpt_oss has no other one in some releases."""
    model = build_model(model_type, attn_implementation="eager")
    plain = run(model)
    expected: dict[str, float] = {}
    handles = []
    for name, module in model.named_modules():
        if name.endswith("v_proj"):  # nothing changes a value behind its projection
            handles.append(
                module.register_forward_hook(
                    lambda _module, _args, output, name=name: expected.update(
                        {name.removesuffix(".v_proj"): largest(output)}
                    )
                )
            )
    stats = CacheStats()
    with watch_attention(model, stats.visit):
        assert torch.equal(run(model), plain)
    for handle in handles:
        handle.remove()
    assert {name: float(value.amax) for name, value in stats.value.items()} == expected
    assert len(stats.key) == 2


def test_keys_are_seen_after_rotation_and_norm(build_model: BuildModel) -> None:
    model = build_model("qwen3_moe")
    before: list[float] = []
    norm = model.model.layers[0].self_attn.k_norm
    norm.weight.mul_(100)
    norm.register_forward_hook(lambda _module, _args, output: before.append(largest(output)))
    stats = CacheStats()
    with watch_attention(model, stats.visit):
        run(model)
    key = float(stats.key["model.layers.0.self_attn"].amax)
    assert 0.5 * before[0] <= key <= 2**0.5 * before[0]  # a rotation turns pairs
    assert key != before[0]


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_everything_is_put_back(implementation: str, build_model: BuildModel) -> None:
    import sys

    model = build_model("llama", attn_implementation=implementation)
    scope = sys.modules[type(model).__module__]
    local, table = dict(TABLE._local_mapping), {name: TABLE[name] for name in TABLE}
    eager = scope.eager_attention_forward
    seen: list[str] = []

    def fail() -> None:
        with watch_attention(model, lambda name, key, value: seen.append(name)):
            assert scope.eager_attention_forward is not eager
            run(model)
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        fail()
    assert len(seen) == 2
    assert dict(TABLE._local_mapping) == local
    assert {name: TABLE[name] for name in TABLE} == table
    assert scope.eager_attention_forward is eager
    run(model)
    assert len(seen) == 2


def test_modules_of_other_models_are_ignored(build_model: BuildModel) -> None:
    model, other = build_model("llama"), build_model("gemma3_text")
    stats = CacheStats()
    with watch_attention(model, stats.visit):
        expected = run(other)
    assert not stats.key
    assert torch.equal(run(other), expected)


def test_a_model_without_attention() -> None:
    with watch_attention(nn.Linear(2, 2), CacheStats().visit):
        pass


def test_nan_and_signs() -> None:
    stats = CacheStats()
    one, low = torch.ones(1, 1, 2, 2), torch.full((1, 1, 2, 2), -3.0)
    stats.visit("a", low, one)
    stats.visit("a", one, one * torch.nan)
    stats.visit("a", one, one)
    assert float(stats.key["a"].amax) == 3.0
    assert stats.value["a"].amax.isnan()


def test_what_is_returned_is_attended_to(build_model: BuildModel) -> None:
    model = build_model("llama", attn_implementation="sdpa")
    plain = run(model)
    with watch_attention(model, lambda path, key, value: (key, torch.zeros_like(value))):
        changed = run(model)
    with watch_attention(model, lambda path, key, value: (key, value)):
        assert torch.equal(run(model), plain)
    for layer in model.model.layers:
        layer.self_attn.v_proj.weight.zero_()
    assert torch.equal(run(model), changed)
    assert not torch.equal(plain, changed)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_two_models_are_watched_and_left_in_any_order(
    implementation: str, build_model: BuildModel
) -> None:
    """As the two sides of a comparison are: each sees its own calls, to the last."""
    models = [build_model("llama", attn_implementation=implementation) for _ in range(2)]
    before = dict(TABLE._local_mapping)
    stats = [CacheStats(), CacheStats()]
    watches = [watch_attention(m, s.visit) for m, s in zip(models, stats, strict=True)]
    for watch in watches:
        watch.__enter__()
    run(models[1])
    assert [len(seen.key) for seen in stats] == [0, 2]
    watches[0].__exit__(None, None, None)
    stats[1].key.clear()
    for model in models:
        run(model)
    assert [len(seen.key) for seen in stats] == [0, 2]
    watches[1].__exit__(None, None, None)
    assert TABLE._local_mapping == before
    stats[1].key.clear()
    run(models[1])
    assert not stats[1].key
