"""An algorithm changes what is written in a format, or is refused for it when a run is planned."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from modelopt_lite import dry_run, quantize_and_export
from modelopt_lite.calibrate.algorithm import Choice, Weight
from modelopt_lite.calibrate.algorithms import check_formats, make_algorithm
from modelopt_lite.calibrate.observe import Site
from modelopt_lite.calibrate.statistics import Statistics
from modelopt_lite.errors import RecipeError
from modelopt_lite.formats.base import Numerics
from modelopt_lite.formats.linear import FORMATS
from modelopt_lite.recipes import Override, Recipe
from modelopt_lite.recipes.algorithms import METHODS, AlgorithmChoice

ROWS, COLUMNS = 128, 256
SEARCHES = sorted(METHODS.keys() - {"max"})
SWEEP = "mse, sweeping"
SITE = Site("w")


def choice_of(method: str) -> AlgorithmChoice:
    if method == SWEEP:
        return AlgorithmChoice(method="mse", options={**METHODS["mse"], "fp8_scale_sweep": True})
    return AlgorithmChoice(method=method, options=METHODS[method])


def written(w: Tensor, choice: Choice, name: str, numerics: Numerics) -> dict[str, Tensor]:
    for step in choice.steps:
        w = step(w)
    return FORMATS[name].quantize(w, choice.amax, numerics=numerics, scale_amax=choice.scale_amax)


@pytest.mark.parametrize("numerics", ["exact", "modelopt"])
@pytest.mark.parametrize("name", sorted(FORMATS))
@pytest.mark.parametrize("method", [*SEARCHES, SWEEP])
def test_it_changes_something_or_is_refused(method: str, name: str, numerics: Numerics) -> None:
    chosen, fmt = choice_of(method), FORMATS[name]
    algorithm = make_algorithm(chosen, numerics)
    assert algorithm is not None
    if algorithm.problem(fmt) is not None:
        with pytest.raises(RecipeError, match=f"'{chosen.method}' does nothing for .*'{name}'"):
            check_formats(chosen, numerics, [fmt])
        return
    assert check_formats(chosen, numerics, [fmt]) == []
    generator = torch.Generator().manual_seed(0)
    w = torch.randn(ROWS, COLUMNS, generator=generator).bfloat16()
    w[::5, ::7] *= 8
    x = torch.randn(64, COLUMNS, generator=generator).bfloat16()
    x[:, ::11] *= 16
    statistics = Statistics(algorithm.kinds)
    statistics.visit(SITE, x, False)
    weight = Weight("w", None, fmt, "w", SITE, statistics.at(SITE), x.abs().amax(0), lambda: w)
    choice = algorithm.choose([weight])["w", None]
    if method == "act_headroom":  # of inputs, not of weights
        assert choice.input_amax is not None
        assert float(choice.input_amax) > float(x.abs().max())
        return
    made = written(w, choice, name, numerics)
    plain = FORMATS[name].quantize(w, None, numerics=numerics)
    assert any(not torch.equal(made[key].float(), plain[key].float()) for key in plain)


def test_each_algorithm_fits_a_format() -> None:
    for method in (*SEARCHES, SWEEP):
        algorithm = make_algorithm(choice_of(method), "exact")
        assert algorithm is not None
        assert any(algorithm.problem(fmt) is None for fmt in FORMATS.values())


def test_a_plan_refuses(checkpoint: Callable[..., Path]) -> None:
    recipe = Recipe(name="mine", weights="fp8", algorithm=choice_of("mse"))
    with pytest.raises(RecipeError, match=r"'mse' does nothing for the format 'fp8': its scales"):
        dry_run(checkpoint("llama"), recipe=recipe)


def test_what_an_algorithm_leaves_is_noted_and_as_without_it(
    checkpoint: Callable[..., Path], token_batches: list[Tensor], tmp_path: Path
) -> None:
    recipe = Recipe(
        name="mine",
        weights="nvfp4",
        algorithm=choice_of("mse"),
        overrides=(Override(modules=("*.self_attn",), weights="fp8"),),
    )
    source = checkpoint("llama")
    notes = dry_run(source, recipe=recipe, calib_data=token_batches)["notes"]
    assert any("'mse' leaves fp8 at the scales of the largest magnitudes" in n for n in notes)
    tensors = []
    for made in (recipe, replace(recipe, algorithm=AlgorithmChoice())):
        out = tmp_path / made.algorithm.method
        quantize_and_export(
            source, export_dir=out, recipe=made, calib_data=token_batches, progress=False
        )
        tensors.append(load_file(out / "model.safetensors"))
    changed = {name for name, t in tensors[0].items() if not torch.equal(t, tensors[1][name])}
    assert any("mlp" in name for name in changed)
    assert not any("self_attn" in name for name in changed)
