"""MXFP4 and MXFP8: against arithmetic in float64, their bounds, ties, edges, blocks of zeros."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from modelopt_lite.errors import ShapeError
from modelopt_lite.formats import e2m1, e8m0, mxfp4, mxfp8
from modelopt_lite.formats.base import Numerics
from modelopt_lite.formats.linear import FORMATS

quick = settings(deadline=None, max_examples=40)
NUMERICS: tuple[Numerics, ...] = ("exact", "modelopt")
numerics_st = st.sampled_from(NUMERICS)
E2M1 = torch.tensor(e2m1.MAGNITUDES, dtype=torch.float64)
MIDDLES = (E2M1[1:] + E2M1[:-1]) / 2


@st.composite
def matrices(draw: st.DrawFn) -> Tensor:
    """[R, K], K a multiple of 32; blocks of any size, of zeros, ties, the ends of float32."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    rows, groups = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    w = torch.randn(rows, groups * 32, generator=generator) * 2.0 ** draw(st.integers(-20, 6))
    match draw(st.sampled_from(("plain", "zero", "ties", "spread", "tiny"))):
        case "zero":
            w[0, :32] = 0.0
            w[-1, -1] = -0.0
        case "ties":
            w = torch.round(w * 24 / w.abs().max()) / 4
        case "spread":
            w *= 2.0 ** torch.randint(-20, 1, w.shape, generator=generator)
        case "tiny":
            w *= 2.0**-126
    return w.clamp(-60000, 60000).to(draw(st.sampled_from((torch.bfloat16, torch.float32))))


def exponents(w: Tensor, largest: float) -> Tensor:
    """The smallest power of two that does, block by block, by trial."""
    found = []
    for amax in w.double().abs().view(-1, 32).amax(-1).tolist():
        guess = math.floor(math.log2(amax / largest)) - 1 if amax else -200
        while largest * 2.0**guess < amax:
            guess += 1
        found.append(max(-127, guess))
    return torch.tensor(found).view(w.shape[0], -1)


@quick
@given(matrices())
def test_mxfp4_codes(w: Tensor) -> None:
    packed, scale = mxfp4.quantize(w, numerics="exact")
    exponent = exponents(w, 6)
    assert (scale.int() - 127).equal(exponent.int())
    size = torch.ldexp(w.double().abs(), -exponent.repeat_interleave(32, 1))
    lower = torch.bucketize(size, MIDDLES)  # a tie takes the lower code ...
    tie = MIDDLES[lower.clamp(max=6)] == size
    code = lower + (tie & (lower % 2 == 1)) + 8 * (w < 0)  # ... which must be even
    assert e2m1.unpack(packed).equal(code.to(torch.uint8))
    check(w, mxfp4.dequantize(packed, scale), mxfp4.error_bound(w, scale))


@quick
@given(matrices())
def test_mxfp4_of_the_peer(w: Tensor) -> None:
    """Ties toward zero; the sign bit of everything that is not above zero."""
    packed, scale = mxfp4.quantize(w, numerics="modelopt")
    size = torch.ldexp(w.double().abs(), 127 - scale.int().repeat_interleave(32, 1))
    code = torch.bucketize(size, MIDDLES) + 8 * (w <= 0)
    assert e2m1.unpack(packed).equal(code.to(torch.uint8))
    check(w, mxfp4.dequantize(packed, scale), mxfp4.error_bound(w, scale))


@quick
@given(matrices(), numerics_st)
def test_mxfp8_codes(w: Tensor, numerics: Numerics) -> None:
    codes, scale = mxfp8.quantize(w, numerics=numerics)
    if w.dtype == torch.bfloat16 or numerics == "exact":
        assert (scale.int() - 127).equal(exponents(w, 448).int())
    step = e8m0.decode(scale).repeat_interleave(32, 1)
    expected = (w.double() / step.double()).float().clamp(-448, 448).to(codes.dtype)
    assert codes.view(torch.uint8).equal(expected.view(torch.uint8))
    check(w, mxfp8.dequantize(codes, scale), mxfp8.error_bound(w, scale))


def check(w: Tensor, value: Tensor, bound: Tensor) -> None:
    assert bool(((value.double() - w.double()).abs() <= bound.double()).all())
    assert bool((value[w == 0] == 0).all())


@quick
@given(matrices(), st.sampled_from(("mxfp4", "mxfp8")), numerics_st)
def test_again_gives_the_same_values(w: Tensor, name: str, numerics: Numerics) -> None:
    """A block whose largest value was rounded down may take half the power, exactly."""
    fmt = FORMATS[name]
    value = fmt.dequantize(fmt.quantize(w, None, numerics=numerics), torch.float32)
    again = fmt.dequantize(fmt.quantize(value, None, numerics=numerics), torch.float32)
    assert again.equal(value)


@pytest.mark.parametrize("scale", [1.0, 2.0**-100, 2.0**100])
def test_codes_stay(scale: float) -> None:
    """Blocks that reach their largest element keep scale and codes, bit by bit."""
    codes = torch.arange(16, dtype=torch.uint8).repeat(4, 4)
    codes[codes == 8] = 0
    packed = e2m1.pack(codes)
    byte = torch.full((4, 2), 127 + int(math.log2(scale)), dtype=torch.uint8)
    again, scale_again = mxfp4.quantize(mxfp4.dequantize(packed, byte), numerics="exact")
    assert again.equal(packed)
    assert scale_again.equal(byte)


@pytest.mark.parametrize("name", ["mxfp4", "mxfp8"])
def test_bound_is_reached(name: str) -> None:
    fmt = FORMATS[name]
    top = 6.0 if name == "mxfp4" else 448.0
    w = torch.cat([torch.full((4096, 1), top), torch.linspace(0, top, 4096 * 31).view(-1, 31)], 1)
    tensors = fmt.quantize(w, None, numerics="exact")
    error = (fmt.dequantize(tensors, torch.float32) - w).abs()
    bound = fmt.max_error(w, tensors, numerics="exact")
    ratio = (error / bound.clamp_min(1e-30)).max()
    assert 0.99 < float(ratio) <= 1
    if name == "mxfp4":
        assert float(error.max()) == pytest.approx(top / 6, rel=1e-3)  # a fifth of the value 5


def test_a_fifth_of_the_block_is_the_worst() -> None:
    generator = torch.Generator().manual_seed(0)
    w = torch.rand(20_000, 32, generator=generator)
    w *= 2 ** torch.rand(20_000, 1, generator=generator)
    packed, scale = mxfp4.quantize(w, numerics="exact")
    error = (mxfp4.dequantize(packed, scale) - w).abs().amax(-1) / w.amax(-1)
    assert 0.19 < float(error.max()) <= 0.2


def test_zeros_ties_and_ends() -> None:
    w = torch.tensor([[6.0, 0.25, 0.75, -1.75, -3.5, 5.0, -0.0, 0.0, -0.1] + [0.0] * 23])
    expected = ([7, 0, 2, 12, 14, 6, 0, 0, 8], [7, 0, 1, 11, 13, 6, 8, 8, 8])
    for numerics, codes in zip(NUMERICS, expected, strict=True):
        packed, scale = mxfp4.quantize(w, numerics=numerics)
        assert scale.tolist() == [[127]]
        assert e2m1.unpack(packed)[0, :9].tolist() == codes
    zero = torch.zeros(1, 32)
    assert mxfp4.quantize(zero, numerics="exact")[1].tolist() == [[0]]
    assert not mxfp4.quantize(zero, numerics="exact")[0].any()
    assert set(mxfp4.quantize(zero, numerics="modelopt")[0].flatten().tolist()) == {0x88}
    above = torch.nextafter(torch.tensor(6.0), torch.tensor(7.0))
    assert int(e8m0.scale_from_amax(above, largest=6.0)) == 128
    assert int(e8m0.scale_from_amax(torch.tensor(3.4e38), largest=6.0)) == 127 + 126
    every = torch.arange(255, dtype=torch.uint8)
    assert e8m0.decode(every).double().equal(2.0 ** (every.double() - 127))
    assert (e8m0.decode(every) * e8m0.inverse(every) == 1).all()


def test_ties_to_even_are_unbiased() -> None:
    """Why exact rounds ties to even: over all ties, magnitudes neither shrink nor grow."""
    w = torch.tensor([[6.0, *(MIDDLES[:-1].tolist() * 5), 6.0]])[:, :32]
    middles = MIDDLES[:-1].sum()
    shrunk = {}
    for numerics in NUMERICS:
        packed, scale = mxfp4.quantize(w, numerics=numerics)
        value = mxfp4.dequantize(packed, scale)[0, 1:7].double()
        shrunk[numerics] = float(middles - value.sum())
    assert shrunk == {"exact": 0, "modelopt": 2}


@pytest.mark.parametrize("name", ["mxfp4", "mxfp8"])
def test_inputs(name: str) -> None:
    fmt = FORMATS[name]
    x = torch.randn(2, 3, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    got = fmt.fake_quantize_input(x, None)
    tensors = fmt.quantize(x.view(6, 64), None, numerics="exact")
    assert got.equal(fmt.dequantize(tensors, x.dtype).view(x.shape))


@pytest.mark.parametrize("name", ["mxfp4", "mxfp8"])
def test_the_peer_leaves_stacks_as_they_lie(name: str) -> None:
    """Its blocks of gpt-oss run along the output channels; ours along the reduction."""
    fmt = FORMATS[name]
    w = torch.randn(2, 64, 96, generator=torch.Generator().manual_seed(0)).bfloat16()
    shapes = {
        numerics: fmt.quantize(w, None, numerics=numerics, input_major=True)["weight_scale"].shape
        for numerics in NUMERICS
    }
    assert shapes == {"exact": (2, 2, 96), "modelopt": (2, 64, 3)}


def test_refusals() -> None:
    for name in ("mxfp4", "mxfp8", "w4a8_nvfp4_fp8", "w4a16_nvfp4_32"):
        assert FORMATS[name].problem((4, 48)) == "K=48 is not a multiple of 32"
    with pytest.raises(ShapeError, match=r"got shape \[4, 48\]"):
        mxfp4.quantize(torch.zeros(4, 48), numerics="exact")


def test_w4a8_nvfp4_stays_within_e4m3() -> None:
    """Element times block scale is at most 448: engines multiply the two in E4M3."""
    w = torch.randn(64, 128, generator=torch.Generator().manual_seed(0)).bfloat16()
    tensors = FORMATS["w4a8_nvfp4_fp8"].quantize(w, None, numerics="modelopt")
    assert tensors["weight_scale_2"] == w.abs().max().float() / 448
    assert float(tensors["weight_scale"].float().max()) == 72  # 448 / 6, in E4M3
    assert tensors["weight_scale"].shape == (64, 4)
