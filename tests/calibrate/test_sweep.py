"""The search of block scales finds what trying all of them finds, and never loses more than max."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from modelopt_lite.calibrate.mse import amax_of_scales, best_multiples
from modelopt_lite.calibrate.sweep import best_block_scales, rounding_error
from modelopt_lite.formats import base, nvfp4
from modelopt_lite.formats.e2m1 import MAGNITUDES
from modelopt_lite.formats.linear import FORMATS, measure_error

GRID = torch.tensor(MAGNITUDES, dtype=torch.float64)


def losses_of_all(w: Tensor, scale_2: Tensor) -> Tensor:
    """[126, N] squared errors under every positive finite E4M3 scale, by distance, in float64."""
    scales = torch.arange(1, 127, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    size = w.double().abs().reshape(-1, 16, 1)
    steps = scales * scale_2.double()
    return torch.stack(
        [((size - GRID * step).abs().amin(-1) ** 2).sum(-1) for step in steps.tolist()]
    )


def test_rounding_error_is_the_distance_to_the_grid() -> None:
    size = torch.linspace(0, 9, 9001)
    expected = (size.double().unsqueeze(-1) - GRID).abs().amin(-1)
    torch.testing.assert_close(rounding_error(size).double(), expected, rtol=0, atol=1e-6)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 1 << 30),
    spread=st.sampled_from([0.0, 0.5, 3.0]),
    shrink=st.sampled_from([0.0, 6.0, 14.0]),
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
    zeros=st.booleans(),
)
def test_the_best_of_126(
    seed: int, spread: float, shrink: float, dtype: torch.dtype, zeros: bool
) -> None:
    generator = torch.Generator().manual_seed(seed)
    w = torch.randn(6, 128, generator=generator)
    w *= torch.exp(spread * torch.randn(6, 128, generator=generator))
    w *= torch.exp(-shrink * torch.rand(6, 8, generator=generator)).repeat_interleave(16, 1)
    if zeros:
        w[:, 32:48] = 0
    w = w.to(dtype)
    scale_2 = nvfp4.weight_scale_2(base.amax(w))
    losses = losses_of_all(w, scale_2)
    code = best_block_scales(w, scale_2).view(torch.uint8).long().view(-1) - 1
    found = losses[code, torch.arange(len(code))]
    best = losses.min(0).values
    assert (found <= best * (1 + 1e-6)).all()
    assert (code[best == 0] <= losses.argmin(0)[best == 0]).all()  # the least of equals


def test_a_sweep_loses_less_than_max_and_stays_within_its_bound() -> None:
    w = (torch.randn(64, 256, generator=torch.Generator().manual_seed(0)) / 30).bfloat16()
    fmt, amax = FORMATS["nvfp4"], base.amax(w)
    chosen = amax_of_scales(best_block_scales(w, nvfp4.weight_scale_2(amax)), amax)
    tensors = fmt.quantize(w, amax, numerics="exact", scale_amax=chosen)
    swept = measure_error(fmt, w, tensors, numerics="exact", chosen=True)
    plain = fmt.quantize(w, amax, numerics="exact")
    assert swept.worst <= 1
    assert swept.relative < 0.95 * measure_error(fmt, w, plain, numerics="exact").relative


@pytest.mark.parametrize("name", ["int8", "int4_weight_only", "nvfp4", "nvfp4_four_over_six"])
def test_best_multiples_are_the_best(name: str) -> None:
    w = (torch.randn(64, 256, generator=torch.Generator().manual_seed(1)) / 30).bfloat16()
    codec, amax = FORMATS[name].codec, base.amax(w)
    own, multipliers = codec.scale_amax(w), [0.7, 0.9, 0.97, 0.998, 1.0, 1.5]
    losses = []
    for multiplier in multipliers:
        kept = codec.quantize(w, amax, numerics="exact", scale_amax=own * multiplier)
        error = codec.dequantize(kept, torch.float64) - w.double()
        losses.append(error.square().view(*own.shape, -1).sum(-1))
    best = torch.stack(losses).min(0)
    chosen = best_multiples(w, amax, codec, multipliers, "exact")
    expected = own * torch.tensor(multipliers)[best.indices]
    assert (chosen == expected).double().mean() > 0.99  # but for ties in float32
    assert len(set(best.indices.view(-1).tolist())) > 1


def test_stacks_take_chosen_scales() -> None:
    w = (torch.randn(3, 4, 128, generator=torch.Generator().manual_seed(2)) / 30).bfloat16()
    for name in ("nvfp4", "int4_weight_only", "int8"):
        fmt = FORMATS[name]
        chosen = torch.stack([fmt.codec.scale_amax(part) * 0.8 for part in w])
        stack = fmt.quantize(w, base.amax(w), numerics="exact", scale_amax=chosen)
        for e, part in enumerate(w):
            one = fmt.quantize(part, base.amax(w), numerics="exact", scale_amax=chosen[e])
            assert torch.equal(stack["weight"][e], one["weight"])
