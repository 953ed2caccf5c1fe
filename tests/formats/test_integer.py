"""INT8 and INT4: against float64 arithmetic, its bound and how tight it is, edges and ties."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from modelopt_lite.errors import ShapeError
from modelopt_lite.formats import base, integer
from modelopt_lite.formats.linear import FORMATS

quick = settings(deadline=None, max_examples=40)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@st.composite
def matrices(draw: st.DrawFn) -> Tensor:
    """[R, K], K a multiple of 128; rows of any size, of zeros, ties, single outliers."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    rows, columns = 2 * draw(st.integers(1, 4)), 128 * draw(st.integers(1, 3))
    w = torch.randn(rows, columns, generator=generator) * 2.0 ** draw(st.integers(-20, 6))
    match draw(st.sampled_from(("plain", "zero", "ties", "outlier", "tiny"))):
        case "zero":
            w[0] = 0.0
        case "ties":
            w = torch.round(w * 254 / w.abs().max()) / 2
            w[:, 0] = 127
        case "outlier":
            w[-1, -1] *= 1000
        case "tiny":
            w *= 1e-36
    return w.clamp(-60000, 60000).to(draw(st.sampled_from(DTYPES)))


def nearest(quotient: Tensor, largest: int) -> Tensor:
    """Round the float32 quotient in float64; torch.round takes ties to the even number."""
    return torch.round(quotient.double()).clamp(-largest - 1, largest)


@quick
@given(matrices())
def test_int8_codes(w: Tensor) -> None:
    scale = integer.int8_scale(base.row_amax(w))
    codes = integer.quantize_int8(w, scale)
    assert codes.double().equal(nearest(w.float() / scale.unsqueeze(-1), 127))
    assert int(codes.min()) >= -127  # the largest magnitude is 127 on both sides
    value = integer.dequantize_int8(codes, scale)
    error = (value.double() - w.double()).abs()
    assert bool((error <= integer.error_bound(w, scale.unsqueeze(-1)).double()).all())
    assert integer.quantize_int8(value, scale).equal(codes)


@quick
@given(matrices())
def test_int4_codes(w: Tensor) -> None:
    amax = integer.block_amax(w)
    assert amax.equal(w.float().abs().view(len(w), -1, 128).amax(-1))
    scale = integer.scale_from_amax(amax, largest=7)
    wide = scale.repeat_interleave(128, 1)
    packed = integer.quantize_int4(w, scale)
    expected = nearest(w.float() / wide, 7)
    low, high = packed & 15, packed >> 4
    codes = torch.stack([low, high], dim=1).view(w.shape).double()
    assert torch.where(codes > 7, codes - 16, codes).equal(expected)
    value = integer.dequantize_int4(packed, scale)
    error = (value.double() - w.double()).abs()
    assert bool((error <= integer.error_bound(w, wide).double()).all())
    assert integer.quantize_int4(value, scale).equal(packed)


def test_int4_in_bytes() -> None:
    """Byte by byte: the even row in the low nibble, in two's complement, -8 only past the edge."""
    w = torch.zeros(4, 128)
    w[:2, :4] = torch.tensor([[7.0, -7.0, 0.5, 1.5], [-1.0, 2.5, -0.5, 6.5]])
    w[2, 0], w[3, 0] = 14.0, -16.0
    one = torch.ones(4, 1)
    packed = integer.quantize_int4(w, one)
    assert packed[0, :5].tolist() == [0xF7, 0x29, 0x00, 0x62, 0x00]
    assert packed[1, 0] == 0x87
    value = integer.dequantize_int4(packed, one)
    assert value[:, 0].tolist() == [7, -1, 7, -8]
    assert integer.scale_from_amax(integer.block_amax(w[:1] * 0), largest=7).tolist() == [[1]]


def test_int4_refuses() -> None:
    fmt = FORMATS["int4_weight_only"]
    assert fmt.problem((3, 128)) == "R=3 is odd, and two rows share a byte"
    assert fmt.problem((2, 128, 3), stacked_input_major=True) is not None
    assert fmt.problem((4, 64)) == "K=64 is not a multiple of 128"
    with pytest.raises(ShapeError, match="got 3 rows"):
        integer.quantize_int4(torch.zeros(3, 128), torch.ones(3, 1))
    with pytest.raises(ShapeError, match=r"got shape \[4, 64\]"):
        integer.block_amax(torch.zeros(4, 64))


@pytest.mark.parametrize(
    "name", ["int8", "int8_per_channel_per_token", "int8_weight_only", "int4_weight_only"]
)
def test_bound_is_reached(name: str) -> None:
    w = torch.linspace(-127, 127, 4 * 9984).view(4, 9984).flip(0)
    w[:, 0] = 127
    fmt = FORMATS[name]
    tensors = fmt.quantize(w, None, numerics="exact")
    value = fmt.dequantize(tensors, torch.float32)
    ratio = (value - w).abs() / fmt.max_error(w, tensors, numerics="exact").clamp_min(1e-30)
    assert 0.99 < float(ratio.max()) <= 1


def test_edges() -> None:
    w = torch.tensor([[127.0, -127.0, 0.5, 1.5, -0.5, -2.5, 126.5, -0.0], [0.0] * 8])
    scale = integer.int8_scale(base.row_amax(w))
    assert scale.tolist() == [1, 1]
    codes = integer.quantize_int8(w, scale)
    assert codes[0].tolist() == [127, -127, 0, 2, 0, -2, 126, 0]
    assert not codes[1].any()
    assert integer.quantize_int8(w * 2, scale)[0, :2].tolist() == [127, -128]


def test_inputs() -> None:
    x = torch.randn(3, 5, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    scale = integer.int8_scale(base.amax(x))
    got = integer.fake_quantize_int8(x, scale)
    assert got.dtype == x.dtype
    codes = integer.quantize_int8(x.view(1, -1), scale.view(1))
    expected = integer.dequantize_int8(codes, scale.view(1), x.dtype)
    assert got.view(1, -1).equal(expected)
    assert float(integer.fake_quantize_int8(torch.tensor(1e9), scale)) == float(127 * scale)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_inputs_by_token(dtype: torch.dtype) -> None:
    """Each token by its own largest magnitude, whatever is beside it; zeros stay."""
    x = torch.randn(3, 5, 64, generator=torch.Generator().manual_seed(0))
    x[0, 1] *= 1000
    x[1, 2] = 0
    x[2, 0] = 2.0**-20  # in float16, a subnormal
    x = x.to(dtype)
    fmt = FORMATS["int8_per_channel_per_token"]
    assert not fmt.static_input
    got = fmt.fake_quantize_input(x, None)
    assert got.dtype == dtype
    step = x.double().abs().amax(-1, keepdim=True) / 127
    expected = torch.where(step > 0, (x.double() / step).round() * step, 0.0)
    # Where float32 rounds a quotient to the other side of a tie, the code is the next one.
    apart = (got.double() - expected).abs()
    assert bool((apart <= torch.finfo(dtype).eps * expected.abs() + step * (1 + 1e-5)).all())
    assert float((apart > torch.finfo(dtype).eps * expected.abs()).double().mean()) < 0.005
    assert bool(((got.double() - x.double()).abs() <= step * 0.5001 + x.abs() * 2.0**-8).all())
    assert not got[1, 2].any()
    alone = [fmt.fake_quantize_input(token, None) for token in x.flatten(0, 1)]
    assert torch.stack(alone).view_as(got).equal(got)
