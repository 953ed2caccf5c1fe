"""act_headroom: the scales of Model Optimizer's calibrator, in any order of batches and experts."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from modelopt_lite import quantize_and_export
from modelopt_lite.calibrate.algorithm import Weight
from modelopt_lite.calibrate.headroom import ActHeadroom, percentile
from modelopt_lite.calibrate.observe import Site
from modelopt_lite.calibrate.statistics import Statistics
from modelopt_lite.errors import RecipeError
from modelopt_lite.formats.linear import FORMATS
from modelopt_lite.recipes.algorithms import METHODS, AlgorithmChoice, parse_algorithm

DEFAULTS = {"anchor_percentile": 1.0, "upper_percentile": 99.99, "rho": 16384.0}
OTHER = {"anchor_percentile": 5.0, "upper_percentile": 100.0, "rho": 100.0}
# What compute_amax of Model Optimizer 0.47's calibrator returned for `inputs_of`, in two calls.
PEER = [
    ("plain", DEFAULTS, "0x1.75feb60000000p+19"),
    ("plain", OTHER, "0x1.945b100000000p+12"),
    ("wide", DEFAULTS, "0x1.0874520000000p+28"),
    ("wide", OTHER, "0x1.fe00000000000p+27"),
    ("zeros", DEFAULTS, "0x1.d072d40000000p+19"),
    ("zeros", OTHER, "0x1.945b100000000p+12"),
    ("flat", DEFAULTS, "0x1.8f1aea0000000p+15"),
    ("flat", OTHER, "0x1.37cd060000000p+8"),
]


def inputs_of(kind: str) -> Tensor:
    n = torch.arange(64 * 64, dtype=torch.float64).view(64, 64)
    x = torch.sin(n * 0.7) * torch.exp2((n % 17) - 8)
    if kind == "wide":
        x = x * torch.exp2(-20 + 40 * ((n // 64) % 8) / 7)
    if kind == "zeros":
        x[::2] = 0
    if kind == "flat":
        x = torch.sign(torch.sin(n * 0.7)) * 3
    return x.to(torch.bfloat16)


def chosen(parts: list[list[Tensor]], options: dict[str, float]) -> float:
    """The amax for inputs that enter several matrices of one group, each in several calls."""
    algorithm = ActHeadroom("modelopt", **options)
    statistics, weights = Statistics(algorithm.kinds), []
    for expert, calls in enumerate(parts):
        site = Site("w", expert)
        for x in calls:
            statistics.visit(site, x, False)
        seen = statistics.at(site)
        args = (FORMATS["nvfp4"], "w", site, seen, None, lambda: torch.zeros(1))
        weights.append(Weight("w", expert, *args))
    found = {choice.input_amax for choice in algorithm.choose(weights).values()}
    assert len({None if amax is None else float(amax) for amax in found}) == 1
    amax = found.pop()
    assert amax is not None
    return float(amax)


@pytest.mark.parametrize(("kind", "options", "amax"), PEER)
def test_it_is_the_peers(kind: str, options: dict[str, float], amax: str) -> None:
    x = inputs_of(kind)
    wanted = float.fromhex(amax)
    assert chosen([[x[:40], x[40:]]], options) == wanted
    assert chosen([[x[40:]], [x[:8], x[8:40]]], options) == wanted  # two experts


def test_percentiles_are_known_to_half_a_bin() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(400, 64, generator=generator) * torch.exp2(
        torch.randn(400, 1, generator=generator) * 4
    )
    statistics, site = Statistics(["histogram"]), Site("w")
    statistics.visit(site, x, False)
    seen = statistics.at(site)
    assert seen is not None
    assert seen.histogram is not None
    assert int(seen.histogram.sum()) == 1600
    blocks = x.abs().view(-1, 16).amax(-1).sort().values
    for percent in (1.0, 50.0, 99.0, 99.99):
        true = float(blocks[math.ceil(percent / 100 * len(blocks)) - 1])
        ratio = percentile(seen.histogram, percent) / true
        assert 2 ** -(5 / 64 + 0.02) <= ratio <= 2 ** (5 / 64 + 0.02)


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe"])
def test_exports_have_the_scales(
    kind: str, checkpoint: Callable[..., Path], token_batches: list[Tensor], tmp_path: Path
) -> None:
    """Only scales of inputs differ from plain NVFP4, and they are larger; siblings share them."""
    made = {}
    for recipe in ("nvfp4", "nvfp4_act_headroom"):
        out = tmp_path / f"{kind}-{recipe}"
        quantize_and_export(
            checkpoint(kind) if recipe == "nvfp4" else tmp_path / f"source_{kind}",
            export_dir=out,
            recipe=recipe,
            calib_data=token_batches,
            progress=False,
        )
        made[recipe] = load_file(out / "model.safetensors")
    plain, other = made.values()
    assert plain.keys() == other.keys()
    scales = [name for name in plain if name.endswith("input_scale")]
    assert scales
    for name, tensor in plain.items():
        if name in scales:
            assert float(other[name]) > float(tensor)
        else:
            assert tensor.dtype == other[name].dtype
            assert torch.equal(tensor.float(), other[name].float()), name
    if kind == "qwen3_moe":
        experts = [n for n in scales if ".0.mlp.experts" in n and ("gate" in n or "up" in n)]
        assert len({float(other[name]) for name in experts}) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rho": 28672.0}, r"algorithm.rho is 28672.0; give one above 0 and below 28672"),
        ({"rho": 0.0}, r"algorithm.rho is 0.0"),
        ({"anchor_percentile": 0.0}, r"anchor_percentile is 0.0; give one above 0, at most 100"),
        ({"upper_percentile": 101.0}, r"upper_percentile is 101.0"),
    ],
)
def test_numbers_outside_of_their_ranges(options: dict[str, float], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        ActHeadroom("exact", **{**DEFAULTS, **options})


def test_the_peers_name_is_known() -> None:
    made = parse_algorithm({"method": "nvfp4_act_headroom", "rho": 8192}, where="here")
    options = {**METHODS["act_headroom"], "rho": 8192.0}
    assert made == AlgorithmChoice(method="act_headroom", options=options)
