"""Every search chooses alike in every layout of experts.

gpt-oss and Llama 4 keep stacks ``[E, in, out]``, whose matrices are transposed views; Qwen3 and
Mixtral publish experts one by one, and transformers stacks them as ``[E, out, in]``.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from modelopt_lite import quantize_and_export
from modelopt_lite.calibrate.algorithm import Weight
from modelopt_lite.calibrate.algorithms import make_algorithm
from modelopt_lite.calibrate.observe import Site
from modelopt_lite.calibrate.statistics import Statistics
from modelopt_lite.formats.linear import FORMATS
from modelopt_lite.recipes import Recipe, load_recipe, preset_names
from modelopt_lite.recipes.algorithms import AlgorithmChoice

MakeCheckpoint = Callable[..., Path]
SEARCHES = tuple(
    name
    for name in preset_names()
    if (recipe := load_recipe(name)).algorithm.method != "max" and recipe.auto_quantize is None
)
SIZES = dict.fromkeys(("hidden_size", "intermediate_size", "moe_intermediate_size"), 64)
LATENT = {"q_lora_rank": 32, "kv_lora_rank": 32}
KINDS = ("qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss", "llama4_text")
TURNED = {"gpt_oss", "llama4_text"}


def small_groups(name: str) -> Recipe:
    recipe = load_recipe(name)
    small = FORMATS[recipe.weights].codec.any_block
    return replace(recipe, group_size=(32,)) if small else recipe


@pytest.mark.parametrize("name", SEARCHES)
def test_a_transposed_view_is_the_matrix(name: str) -> None:
    """To the last bit, also where the matrix is cut into pieces."""
    recipe = small_groups(name)
    fmt = FORMATS[recipe.weights]
    if fmt.codec.any_block:
        fmt = fmt.with_group_size(32)
    algorithm = make_algorithm(recipe.algorithm, "exact")
    assert algorithm is not None
    generator = torch.Generator().manual_seed(3)
    w_KR = (torch.randn(96, 40, generator=generator) / 20).bfloat16()
    x = torch.randn(50, 96, generator=generator).bfloat16()
    x[:, ::11] *= 16
    statistics = Statistics(algorithm.kinds)
    site = Site("w")
    statistics.visit(site, x, False)
    made = []
    for layout in (w_KR.mT, w_KR.mT.contiguous()):
        seen, amax = statistics.at(site), x.abs().amax(0)
        weight = Weight("w", None, fmt, "w", site, seen, amax, partial(torch.clone, layout))
        choice = algorithm.choose([weight])["w", None]
        value = layout
        for step in choice.steps:
            value = step(value)
        tensors = fmt.quantize(value, choice.amax, numerics="exact", scale_amax=choice.scale_amax)
        scale, headroom = choice.pre_quant_scale, choice.input_amax
        more = {"pre_quant_scale": scale, "input_amax": headroom, **choice.extras}
        made.append(tensors | {k: t for k, t in more.items() if t is not None})
    assert made[0].keys() == made[1].keys()
    for key, tensor in made[0].items():
        assert torch.equal(tensor.float(), made[1][key].float()), key


@pytest.fixture(scope="module")
def plain_exports(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dict[str, Tensor]]:
    """Return a function (source, recipe) -> tensors under largest magnitudes, made once each."""
    made: dict[tuple[str, str], dict[str, Tensor]] = {}

    def export(source: Path, recipe: Recipe, ids: list[Tensor]) -> dict[str, Tensor]:
        key = source.name, recipe.weights
        if key not in made:
            out = tmp_path_factory.mktemp("plain") / "out"
            made[key] = run(source, out, replace(recipe, algorithm=AlgorithmChoice()), ids)
        return made[key]

    return export


def run(source: Path, out: Path, recipe: Recipe, ids: list[Tensor]) -> dict[str, Tensor]:
    report = quantize_and_export(
        source, export_dir=out, recipe=recipe, calib_data=ids, progress=False
    )
    assert not report.beyond_bound
    tensors: dict[str, Tensor] = load_file(out / "model.safetensors")
    return tensors


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", SEARCHES)
def test_experts_of_every_layout_are_searched(
    kind: str,
    name: str,
    checkpoint: MakeCheckpoint,
    token_batches: list[Tensor],
    plain_exports: Callable[..., dict[str, Tensor]],
    tmp_path: Path,
) -> None:
    """The audit finds nothing, and the experts are not those of largest magnitudes."""
    source, recipe = checkpoint(kind, **SIZES, **LATENT), small_groups(name)
    searched = run(source, tmp_path / "out", recipe, token_batches)  # which ends with the audit
    plain = plain_exports(source, recipe, token_batches)
    names = [key for key in plain if ".experts." in key]
    assert names
    assert any(len(plain[key].shape) == 3 for key in names) == (kind in TURNED)
    for part in ("gate|w1", "down|w2"):
        own = [key for key in names if re.search(part, key)]
        assert any(not torch.equal(plain[key].float(), searched[key].float()) for key in own), part
