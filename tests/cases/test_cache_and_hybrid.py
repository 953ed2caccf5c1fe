"""Scales of the key and value cache, and layers that are not attention."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from modelopt_lite.errors import RecipeError

Make = Callable[..., Path]


def cached(cases: Any, source: Path) -> list[tuple[float, float]]:
    """Largest key and value of each layer, read from the cache that a plain forward fills."""
    model = cases.load(source)
    best: list[tuple[float, float]] = []
    for batch in cases.batches:
        with torch.no_grad():
            cache = model(batch, use_cache=True).past_key_values
        pairs: list[tuple[Tensor, Tensor]] = (
            [(layer.keys, layer.values) for layer in cache.layers]
            if hasattr(cache, "layers")
            else list(cache)
        )
        seen = [(float(k.abs().max()), float(v.abs().max())) for k, v in pairs]
        best = [(max(a, c), max(b, d)) for (a, b), (c, d) in zip(best or seen, seen, strict=True)]
    return best


@pytest.mark.parametrize("kind", ["llama", "phi3", "qwen3_moe"])
@pytest.mark.parametrize("recipe", ["fp8", "nvfp4", "w4a16_nvfp4"])
def test_c66_c67_cache_scales_are_measured(
    checkpoint: Make, cases: Any, kind: str, recipe: str
) -> None:
    """Scales stayed at 0 or 1, or were missing, while the config promised an FP8 cache.

    Models with one joined projection have no module of the names that engines look up; what an
    attention attends to is measured, whatever made it.
    """
    source = checkpoint(kind)

    def louder(tensors: dict[str, Tensor]) -> None:
        if kind == "phi3":
            tensors["model.layers.0.self_attn.qkv_proj.weight"][32:48] *= 64
        elif kind == "llama":
            tensors["model.layers.0.self_attn.k_proj.weight"] *= 64

    cases.edit(source, louder)
    out = cases.run(source, recipe, kv_cache="fp8")
    truth = cached(cases, source)
    for layer, (key, value) in enumerate(truth):
        prefix = f"model.layers.{layer}.self_attn"
        joined = kind == "phi3"
        k_scale = out.tensors[f"{prefix}.{'qkv' if joined else 'k'}_proj.k_scale"]
        v_scale = out.tensors[f"{prefix}.{'qkv' if joined else 'v'}_proj.v_scale"]
        assert float(k_scale) == pytest.approx(key / 448, rel=1e-6)
        assert float(v_scale) == pytest.approx(value / 448, rel=1e-6)
        assert k_scale.dtype == v_scale.dtype == torch.float32
        assert min(float(k_scale), float(v_scale)) > 0
    assert len({key for key, _ in truth}) == 2
    assert out.quantization["kv_cache_quant_algo"] == "FP8"
    assert out.config["quantization_config"]["kv_cache_scheme"]["num_bits"] == 8
    assert not out.problems()


def test_c66_without_a_cache_format(checkpoint: Make, cases: Any) -> None:
    """Nothing is promised and nothing written where it was not asked for."""
    out = cases.run(checkpoint("llama"))
    assert out.quantization["kv_cache_quant_algo"] is None
    assert "kv_cache_scheme" not in out.config["quantization_config"]
    assert not [name for name in out.tensors if name.endswith(("k_scale", "v_scale"))]


@pytest.mark.parametrize("kind", ["deepseek_v3", "gpt_oss", "gemma3_text", "nemotron_h"])
def test_c66_other_attentions(checkpoint: Make, cases: Any, kind: str) -> None:
    """Latent, sliding and hybrid attention: one pair of scales for each attention layer."""
    out = cases.run(checkpoint(kind), "fp8", kv_cache="fp8")
    keys = [n for n in out.tensors if n.endswith(".k_scale")]
    values = [n for n in out.tensors if n.endswith(".v_scale")]
    assert len(keys) == len(values) == (1 if kind == "nemotron_h" else 2)
    assert all(float(out.tensors[n]) > 0 for n in keys + values)
    assert not out.problems()


def test_c66_unknown_cache_format(checkpoint: Make, cases: Any) -> None:
    """Asked for a format that does not exist."""
    with pytest.raises(RecipeError, match="did you mean 'fp8'"):
        cases.run(checkpoint("llama"), kv_cache="fp9")


@pytest.mark.parametrize("recipe", ["fp8", "nvfp4", "w4a16_nvfp4"])
def test_c68_small_tensors_of_state_space_layers(checkpoint: Make, cases: Any, recipe: str) -> None:
    """A convolution of four taps and state parameters were taken for linear layers."""
    out = cases.run(checkpoint("nemotron_h"), recipe)
    for leaf in ("A_log", "D", "dt_bias", "conv1d.weight", "conv1d.bias", "norm.weight"):
        names = [n for n in out.original if n.endswith(f".mixer.{leaf}")]
        assert names, leaf
        for name in names:
            assert torch.equal(out.tensors[name], out.original[name])
            assert out.tensors[name].dtype == out.original[name].dtype
    assert "backbone.layers.0.mixer.conv1d" in out.excluded
    assert {"backbone.layers.0.mixer.in_proj", "backbone.layers.0.mixer.out_proj"} <= out.packed
    assert not out.problems()
