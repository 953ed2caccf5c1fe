"""Statistics of a model whose inputs are rounded, against hooks on plain transformers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from modelopt_lite import quantize, quantize_and_export
from modelopt_lite.calibrate.algorithm import Choices, Each, Weight
from modelopt_lite.calibrate.local_hessian import LocalHessian
from modelopt_lite.errors import RecipeError
from modelopt_lite.formats.linear import FORMATS

RECIPE = "nvfp4_w4a4_weight_local_hessian"


def products_of_hooks(source: Path, batches: Sequence[Tensor]) -> dict[str, Tensor]:
    """Products within blocks of what enters each linear layer, all inputs being rounded."""
    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    linears = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear) and "layers" in n}
    amax: dict[str, Tensor] = {}
    found: dict[str, Tensor] = {}
    fmt = FORMATS["nvfp4"]

    def see(name: str, x: Tensor) -> None:
        amax[name] = torch.maximum(amax.get(name, x.new_zeros(())), x.abs().max())

    def rounded(name: str, x: Tensor) -> Tensor:
        blocks = x.float().reshape(-1, x.shape[-1] // 16, 16)
        products = torch.einsum("tbi,tbj->bij", blocks, blocks)
        found[name] = found.get(name, torch.zeros_like(products)) + products
        return fmt.fake_quantize_input(x, fmt.input_scale(amax[name]))

    for look in (see, rounded):
        hooks = [
            m.register_forward_pre_hook(lambda _, args, n=n, look=look: look(n, args[0]))
            for n, m in linears.items()
        ]
        with torch.inference_mode():
            for ids in batches:
                model(ids, use_cache=False)
        for hook in hooks:
            hook.remove()
    return found


def test_statistics_are_those_behind_rounded_inputs(
    checkpoint: Callable[..., Path],
    token_batches: list[Tensor],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = checkpoint("llama")
    seen: dict[str, dict[str, Tensor]] = {"exact": {}, "modelopt": {}}
    choose = LocalHessian.choose

    def spy(self: LocalHessian, weights: Sequence[Weight], each: Each) -> Choices:
        for weight in weights:
            assert weight.seen is not None
            assert weight.seen.blocks is not None
            seen[self.numerics][weight.name] = weight.seen.blocks.clone()
        return choose(self, weights, each)

    monkeypatch.setattr(LocalHessian, "choose", spy)
    for numerics in ("exact", "modelopt"):
        options: dict[str, Any] = {"recipe": RECIPE, "numerics": numerics, "progress": False}
        out = tmp_path / numerics
        report = quantize_and_export(source, export_dir=out, calib_data=token_batches, **options)
        assert not report.cold_experts
    wanted = products_of_hooks(source, token_batches)
    assert wanted.keys() == seen["modelopt"].keys()
    for name, products in wanted.items():
        torch.testing.assert_close(seen["modelopt"][name], products, rtol=1e-4, atol=1e-6)
    first = ("layers.0.self_attn.q_proj", "layers.0.self_attn.k_proj", "layers.0.self_attn.v_proj")
    later = [name for name in wanted if not name.endswith(first)]
    assert len(later) == len(wanted) - 3
    for name in later:
        assert not torch.allclose(seen["exact"][name], wanted[name], rtol=1e-3)


def test_a_loop_of_ones_own_cannot(checkpoint: Callable[..., Path]) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint("llama"))
    with pytest.raises(RecipeError, match="layers with rounded inputs before it put out"):
        quantize(model, RECIPE, numerics="modelopt")
