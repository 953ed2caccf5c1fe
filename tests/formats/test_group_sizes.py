"""INT4 in groups of other sizes than 128: as 128, in both dialects, read again, within bounds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from modelopt_lite import Recipe, dry_run, perplexity, quantize_and_export
from modelopt_lite.checkpoint.dequant import open_source
from modelopt_lite.errors import RecipeError, ShapeError
from modelopt_lite.formats.linear import FORMATS, get_format, measure_error
from modelopt_lite.recipes import load_recipe, parse_recipe
from modelopt_lite.recipes.algorithms import METHODS, AlgorithmChoice
from modelopt_lite.verify.audit import audit

MakeCheckpoint = Callable[..., Path]
SHAPES: dict[str, Any] = {"hidden_size": 192, "intermediate_size": 320, "head_dim": 48}


@given(
    size=st.sampled_from([8, 16, 24, 64, 96]),
    groups=st.integers(1, 3),
    seed=st.integers(0, 99),
    name=st.sampled_from(["int4_weight_only", "w4a8_awq"]),
)
def test_each_group_as_a_block(size: int, groups: int, seed: int, name: str) -> None:
    """A scale is the largest magnitude of its group over 7; no value is further than half of it."""
    w = torch.randn(6, size * groups, generator=torch.Generator().manual_seed(seed))
    fmt = get_format(f"{name}_{size}")
    assert fmt.weight_bits == 4 + 32 / size
    tensors = fmt.quantize(w, None, numerics="exact")
    amax = w.view(6, groups, size).abs().amax(-1)
    assert torch.equal(tensors["weight_scale"], (amax.double() / 7).float())
    value = fmt.dequantize(tensors, torch.float32)
    error = (value - w).view(6, groups, size).abs().amax(-1)
    assert bool((error <= tensors["weight_scale"] * 0.5 * (1 + 2**-15)).all())
    assert measure_error(fmt, w, tensors, numerics="exact").worst <= 1
    again = fmt.quantize(value, None, numerics="exact")
    assert torch.equal(fmt.dequantize(again, torch.float32), value)


@pytest.mark.parametrize("method", ["max", "mse", "awq_lite", "awq_clip", "gptq"])
def test_exports(
    method: str, checkpoint: MakeCheckpoint, token_batches: list[Tensor], tmp_path: Path
) -> None:
    source, out = checkpoint("llama", **SHAPES), tmp_path / "out"
    recipe = Recipe(
        name="groups",
        weights="int4_weight_only",
        group_size=(128, 64),
        algorithm=AlgorithmChoice(method=method, options=METHODS[method]),
        exclude=("*.o_proj", "*.down_proj") if method == "awq_lite" else (),
    )
    report = quantize_and_export(
        source,
        export_dir=out,
        recipe=recipe,
        dialect="both",
        calib_data=None if method in {"max", "mse"} else token_batches,
        progress=False,
    )
    assert "groups of 64 instead of 128, which does not divide" in " ".join(report.notes)
    assert not report.beyond_bound
    for name in ("modelopt", "compressed-tensors"):
        assert not [f for f in audit(out / name, deep=True) if f.severity == "error"]
        with open_source(out / name) as read, open_source(source) as original:
            for tensor, info in original.tensors.items():
                if len(info.shape) == 2 and method == "max":
                    w = original.read(tensor).float()
                    worst = (read.read(tensor).float() - w).abs().max()
                    assert float(worst) <= float(w.abs().max()) * (1 / 14 + 2**-8)
        after = perplexity(out / name, text=token_batches, device="cpu")
        before = perplexity(source, text=token_batches, device="cpu")
        assert after.nll == pytest.approx(before.nll, rel=0.05)


def test_mixed_sizes_are_read_by_layer(checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    source, out = checkpoint("llama", **SHAPES), tmp_path / "out"
    data = {
        "name": "mixed",
        "weights": "int4_weight_only_32",
        "overrides": [{"modules": ["*.mlp"], "weights": "int4_weight_only_64"}],
    }
    recipe = parse_recipe(data, where="here")
    quantize_and_export(source, export_dir=out, recipe=recipe, dialect="both", progress=False)
    for name in ("modelopt", "compressed-tensors"):
        assert not [f for f in audit(out / name, deep=True) if f.severity == "error"]
        with open_source(out / name) as read, open_source(source) as original:
            w = original.read("model.layers.0.mlp.up_proj.weight").float()
            value = read.read("model.layers.0.mlp.up_proj.weight").float()
            assert float((value - w).norm() / w.norm()) < 0.15
    scale = load_file(out / "modelopt" / "model.safetensors")[
        "model.layers.0.self_attn.q_proj.weight_scale"
    ]
    assert scale.shape[1] == SHAPES["hidden_size"] // 32


def test_what_does_not_fit(checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    source = checkpoint("llama", **SHAPES)
    with pytest.raises(ShapeError, match=r"K=192 is not a multiple of 128.*group_size: 64"):
        dry_run(source, recipe="int4_weight_only")
    recipe = Recipe(name="mine", weights="nvfp4", group_size=(64,))
    with pytest.raises(RecipeError, match=r"no matrix has a format whose groups.*nvfp4"):
        dry_run(source, recipe=recipe)
    with pytest.raises(RecipeError, match=r"group_size 12 does not fit .*multiple of 8"):
        dry_run(source, recipe=Recipe(name="mine", weights="int4_weight_only", group_size=(12,)))
    path = tmp_path / "mine.yaml"
    path.write_text("weights: int4_weight_only\ngroup_size: 60\n")
    with pytest.raises(RecipeError, match=r"group_size must be a multiple of 8.*got 60"):
        load_recipe(path)
    path.write_text("weights: int4_weight_only\ngroup_size: 64\n")
    assert load_recipe(path).group_size == (64,)


def test_names() -> None:
    assert FORMATS["int4_weight_only_128"] is FORMATS["int4_weight_only"]
    assert FORMATS["int4_weight_only_64"].family == "int4_weight_only"
    assert "int4_weight_only_64" not in list(FORMATS)
    for name in ("nvfp4_64", "int4_weight_only_", "int4_weight_only_x"):
        with pytest.raises(RecipeError, match="unknown format"):
            get_format(name)
