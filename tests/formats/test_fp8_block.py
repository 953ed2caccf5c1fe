"""Block FP8: against block by block arithmetic, its bound, edges, and blocks of zeros."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from modelopt_lite.errors import ShapeError
from modelopt_lite.formats import fp8, fp8_block
from modelopt_lite.formats.linear import FORMATS

FMT = FORMATS["fp8_2d_blockwise_weight_only"]


@st.composite
def matrices(draw: st.DrawFn) -> Tensor:
    """Any rows, whole or broken blocks of columns, of very different sizes, some of zeros."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    rows, columns = draw(st.integers(1, 300)), draw(st.integers(1, 300))
    w = torch.randn(rows, columns, generator=generator)
    scale = 2.0 ** torch.randint(-30, 10, fp8_block.grid_shape(rows, columns), generator=generator)
    if draw(st.booleans()):
        scale[0, 0] = 0
    w *= scale.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
    return w.to(draw(st.sampled_from([torch.bfloat16, torch.float16, torch.float32])))


@settings(deadline=None, max_examples=40)
@given(matrices())
def test_each_block_is_a_matrix_of_its_own(w: Tensor) -> None:
    amax = fp8_block.block_amax(w)
    scale = fp8.scale_from_amax(amax)
    codes = fp8_block.quantize(w, scale, numerics="exact")
    value = fp8_block.dequantize(codes, scale)
    bound = fp8_block.error_bound(w, scale)
    assert bool(((value - w.float()).abs() <= bound).all())
    for g in range(amax.shape[0]):
        for h in range(amax.shape[1]):
            part = (slice(g * 128, (g + 1) * 128), slice(h * 128, (h + 1) * 128))
            assert amax[g, h] == w[part].float().abs().max()
            expected = fp8.quantize(w[part].float(), scale[g, h], numerics="exact")
            assert codes[part].view(torch.uint8).equal(expected.view(torch.uint8))
            assert bool(amax[g, h]) or float(scale[g, h]) == 1
    again = fp8_block.quantize(value, scale, numerics="exact")
    assert again.view(torch.uint8).equal(codes.view(torch.uint8))


def test_bound_is_reached() -> None:
    w = torch.linspace(1e-3, 448, 128 * 384).view(128, 384)
    scale = fp8.scale_from_amax(fp8_block.block_amax(w))
    value = fp8_block.dequantize(fp8_block.quantize(w, scale, numerics="exact"), scale)
    ratio = (value - w).abs() / fp8_block.error_bound(w, scale)
    assert 0.99 < float(ratio.max()) <= 1


def test_shapes_on_disk() -> None:
    """Engines read a grid with axes of one; the peer alone writes a single block as a scalar."""
    grids = {
        (shape, numerics): FMT.tensors(shape, numerics=numerics)[1].shape
        for shape in ((300, 256), (64, 128))
        for numerics in ("exact", "modelopt")
    }
    assert grids == {
        ((300, 256), "exact"): (3, 1, 2, 1),
        ((300, 256), "modelopt"): (3, 1, 2, 1),
        ((64, 128), "exact"): (1, 1, 1, 1),
        ((64, 128), "modelopt"): (),
    }
    w = torch.randn(64, 128).bfloat16()
    one = FMT.quantize(w, None, numerics="modelopt")
    other = FMT.quantize(w, w.abs().max() * 4, numerics="exact")
    assert one["weight_scale"] == other["weight_scale"]
    shared = FMT.quantize(w, w.abs().max().float() * 4, numerics="modelopt")
    assert shared["weight_scale"] == one["weight_scale"] * 4


def test_scales_of_another_shape_are_refused() -> None:
    with pytest.raises(ShapeError, match=r"needs scales of shape \[2, 3\], got \[2, 2\]"):
        fp8_block.quantize(torch.zeros(256, 384), torch.ones(2, 2), numerics="exact")
