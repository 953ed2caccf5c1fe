"""FP8 and NVFP4 against slow, independent arithmetic, and against their stated error bounds."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from modelopt_lite.formats import base, fp8, nvfp4
from modelopt_lite.formats.base import Numerics
from modelopt_lite.formats.linear import FORMATS, measure_error

Array = npt.NDArray[np.float64]
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
NUMERICS: tuple[Numerics, ...] = ("exact", "modelopt")
E2M1 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])

numerics_st = st.sampled_from(NUMERICS)
# Examples are cheap but torch's first call is not.
quick = settings(deadline=None, max_examples=60)


def e4m3_values() -> Array:
    """The value of each positive code but NaN, from the definition."""
    codes = np.arange(127)
    exponent, mantissa = codes >> 3, codes & 7
    normal = (1 + mantissa / 8) * 2.0 ** (exponent - 7.0)
    return np.where(exponent == 0, mantissa / 8 * 2.0**-6, normal)


E4M3 = e4m3_values()


def nearest(x: Array, values: Array) -> npt.NDArray[np.uint8]:
    """Index of the nearest value of an ascending table; ties to even; past it the last."""
    upper = np.searchsorted(values, x).clip(1, len(values) - 1)
    below, above = x - values[upper - 1], values[upper] - x
    take_upper = (above < below) | ((above == below) & (upper % 2 == 0))
    return np.where(take_upper, upper, upper - 1).astype(np.uint8)


def f64(t: Tensor) -> Array:
    return np.asarray(t.double().numpy())


def rounded(x: Array, dtype: torch.dtype) -> Array:
    """Round float64 to a narrower dtype; harmless as a detour for quotients (53 >= 2 * 24 + 2)."""
    return f64(torch.from_numpy(np.asarray(x)).to(dtype))


def slow_fp8(w: Tensor, scale: Tensor, numerics: Numerics) -> Tensor:
    divisor = f64(scale if scale.ndim == 0 else scale.unsqueeze(-1))
    quotient = rounded(f64(w) / divisor, torch.float32)
    if numerics == "modelopt" and scale.ndim == 0:
        quotient = rounded(quotient, w.dtype)
    code = nearest(np.abs(quotient), E4M3) | (np.signbit(quotient).astype(np.uint8) << 7)
    return torch.from_numpy(code)


def slow_nvfp4(w: Tensor, scale_2: Tensor) -> tuple[Tensor, Tensor]:
    rows, columns = w.shape
    blocks = f64(w).reshape(rows, columns // 16, 16)
    unit = rounded(6 * f64(scale_2), torch.float32)
    ideal = rounded(np.abs(blocks).max(-1) / unit, torch.float32)
    scale = nearest(np.where(ideal == 0, 1.0, ideal).clip(2.0**-9, 448), E4M3)
    step = rounded(E4M3[scale] * f64(scale_2), torch.float32)[..., None]
    value = rounded(np.abs(blocks) / step, torch.float32)
    code = nearest(value, E2M1) | ((blocks < 0).astype(np.uint8) << 3)
    code = code.reshape(rows, columns)
    return torch.from_numpy(code[:, ::2] | code[:, 1::2] << 4), torch.from_numpy(scale)


def raw(t: Tensor) -> Tensor:
    return t.contiguous().view(torch.uint8)


@st.composite
def matrices(draw: st.DrawFn) -> Tensor:
    """A finite [R, K], K a multiple of 16; with zero, tiny or huge rows, blocks or elements."""
    rows, columns = draw(st.integers(1, 5)), 16 * draw(st.integers(1, 4))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    w = torch.randn(rows, columns, generator=generator) * 2.0 ** draw(st.integers(-12, 8))
    features = ("plain", "zero", "block", "row", "outlier", "spread", "ties", "tiny")
    match draw(st.sampled_from(features)):
        case "zero":
            w.zero_()
        case "block":
            w[0, :16] = -0.0
        case "row":
            w[-1] *= 1e-4
        case "outlier":
            w[0, -1] *= 1000
        case "spread":
            w *= 2.0 ** torch.randint(-20, 1, (rows, columns), generator=generator)
        case "ties":
            w = torch.round(w * 24 / w.abs().max()) / 4
        case "tiny":
            w *= 1e-34
    return w.clamp(-60000, 60000).to(draw(st.sampled_from(DTYPES)))


def whole_blocks(w: Tensor, name: str) -> Tensor:
    """Repeat a matrix to the right until the blocks of a format divide its columns."""
    return w if FORMATS[name].problem(tuple(w.shape)) is None else w.repeat(2, 8)


@quick
@given(matrices(), numerics_st, st.booleans())
def test_fp8_codes(w: Tensor, numerics: Numerics, per_row: bool) -> None:
    amax = base.row_amax(w) if per_row else base.amax(w)
    scale = fp8.scale_from_amax(amax, numerics=numerics)
    codes = fp8.quantize(w, scale, numerics=numerics)
    assert raw(codes).equal(slow_fp8(w, scale, numerics))
    if numerics == "modelopt":
        naive = (w / (scale.unsqueeze(-1) if per_row else scale)).to(torch.float8_e4m3fn)
        assert raw(codes).equal(raw(naive))


@quick
@given(matrices(), numerics_st)
def test_nvfp4_codes(w: Tensor, numerics: Numerics) -> None:
    scale_2 = nvfp4.weight_scale_2(base.amax(w), numerics=numerics)
    packed, scale = nvfp4.quantize(w, scale_2)
    slow_packed, slow_scale = slow_nvfp4(w, scale_2)
    assert raw(scale).equal(slow_scale)
    assert packed.equal(slow_packed)
    assert nvfp4.pack(nvfp4.unpack(packed)).equal(packed)


@quick
@given(matrices(), numerics_st, st.sampled_from(sorted(FORMATS)), st.floats(1, 64))
def test_bound_holds(w: Tensor, numerics: Numerics, name: str, group: float) -> None:
    """For every format, also under the amax of a larger fellow of the group."""
    fmt, w = FORMATS[name], whole_blocks(w, name)
    if numerics == "modelopt" and 0 < float(base.amax(w)) < 1e-30:
        numerics = "exact"
    tensors = fmt.quantize(w, base.amax(w) * group, numerics=numerics)
    report = measure_error(fmt, w, tensors, numerics=numerics)
    assert report.worst <= 1
    value = fmt.dequantize(tensors, torch.float32)
    error = (value.double() - w.double()).abs()
    assert bool((error <= fmt.max_error(w, tensors, numerics=numerics).double()).all())
    assert bool((value[w == 0] == 0).all())
    scales = [t for k, t in tensors.items() if "scale" in k and t.dtype != torch.uint8]
    assert all(bool((t.float() > 0).all()) for t in scales)


def sweep(blocks: int) -> Tensor:
    """Blocks of every size under the amax 448 * 6, each with values all over its range."""
    generator = torch.Generator().manual_seed(0)
    size = 2.0 ** torch.linspace(-19, 0, blocks)
    fill = torch.rand(blocks, 15, generator=generator)
    w = 2688 * size.unsqueeze(-1) * torch.cat([torch.ones(blocks, 1), fill], dim=1)
    w[-1, 0] = 2688
    return w


@pytest.mark.parametrize("small", [False, True])
def test_nvfp4_bound_is_tight(small: bool) -> None:
    w = sweep(60_000)
    is_small = w.amax(-1) < 6 * 2.0**-6
    scale_2 = nvfp4.weight_scale_2(base.amax(w))
    packed, scale = nvfp4.quantize(w, scale_2)
    error = (nvfp4.dequantize(packed, scale, scale_2) - w).abs()
    bound = nvfp4.error_bound(w, scale_2)
    chosen = is_small if small else ~is_small
    ratio = (error / bound)[chosen]
    assert 0.9 < float(ratio.max()) <= 1
    # The cap at |w| is not what makes it tight.
    assert float(ratio[(w > 2 * bound)[chosen]].max()) > 0.9


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("numerics", NUMERICS)
def test_fp8_bound_is_tight(dtype: torch.dtype, numerics: Numerics) -> None:
    w = torch.cat([torch.linspace(0, 448, 100_001), torch.logspace(-14, 8.7, 99_999, base=2)])
    w = w.to(dtype).clamp(max=448)
    scale = fp8.scale_from_amax(base.amax(w), numerics=numerics)
    error = (fp8.dequantize(fp8.quantize(w, scale, numerics=numerics), scale) - w.float()).abs()
    ratio = error / fp8.error_bound(w, scale, numerics=numerics).clamp_min(1e-30)
    assert float(ratio.max()) <= 1
    assert float(ratio[w >= 2.0**-6].max()) > 0.9
    assert float(ratio[(w < 2.0**-6) & (w > 2.0**-8)].max()) > 0.9


@quick
@given(matrices(), st.sampled_from(sorted(FORMATS)))
def test_again_gives_the_same_values(w: Tensor, name: str) -> None:
    fmt, w = FORMATS[name], whole_blocks(w, name)
    amax = base.amax(w)
    tensors = fmt.quantize(w, amax, numerics="exact")
    value = fmt.dequantize(tensors, torch.float32)
    repeated = fmt.quantize(value, amax, numerics="exact")
    if fmt.codec.stacks_as_stored:  # MX: half the power of two may do, see test_mx.py
        assert fmt.dequantize(repeated, torch.float32).equal(value)
        return
    if "weight_scale_2" not in tensors:
        assert raw(repeated["weight"]).equal(raw(tensors["weight"]))
        return
    # A block whose largest value was rounded may get another scale, under which the bound holds.
    again = fmt.dequantize(repeated, torch.float32)
    bound = fmt.max_error(value, tensors, numerics="exact")
    assert bool(((again - value).abs() <= bound).all())


def test_nvfp4_keeps_codes_when_blocks_reach_six() -> None:
    codes = torch.randint(0, 16, (32, 64), dtype=torch.uint8)
    codes[codes == 8] = 0
    codes[:, ::16] = 7
    scale = torch.arange(1, 127, dtype=torch.uint8)[torch.randint(0, 126, (32, 4))]
    scale[0, 0] = 126
    packed, scale_RB = nvfp4.pack(codes), scale.view(torch.float8_e4m3fn)
    scale_2 = torch.tensor(0.0123)
    value = nvfp4.dequantize(packed, scale_RB, scale_2)
    again, scale_again = nvfp4.quantize(value, scale_2)
    assert raw(scale_again).equal(scale)
    assert again.equal(packed)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", sorted(FORMATS))
def test_chunks_threads_and_strides_do_not_matter(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    fmt = FORMATS[name]
    w = (torch.randn(96, 384, generator=torch.Generator().manual_seed(1)) / 7).to(dtype)

    def run(x: Tensor) -> dict[str, Tensor]:
        tensors = fmt.quantize(x, base.amax(w), numerics="modelopt")
        tensors["value"] = fmt.dequantize(tensors, torch.float32)
        return tensors

    expected = run(w)
    wide = torch.zeros(96, 768, dtype=dtype)
    wide[:, ::2] = w
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        results = [run(w), run(w.t().contiguous().t()), run(wide[:, ::2])]
        monkeypatch.setattr(base, "_CPU_CHUNK", 500)
        results.append(run(w))
        torch.set_num_threads(1)
        results.append(run(w))
    finally:
        torch.set_num_threads(threads)
    for result in results:
        assert all(raw(result[k].view(-1)).equal(raw(expected[k].view(-1))) for k in expected)


def test_special_values() -> None:
    assert float(fp8.scale_from_amax(torch.tensor(0.0))) == 1
    assert float(fp8.scale_from_amax(torch.tensor(float("nan")), numerics="modelopt")) == 1
    assert float(nvfp4.weight_scale_2(torch.tensor(0.0))) == pytest.approx(1 / 448)
    w = torch.tensor([[0.0, -0.0, -1e-9, 6.0, -6.0, 0.25, -0.75, 5.0] + [0.0] * 24])
    packed, scale = nvfp4.quantize(w, torch.tensor(1 / 448))
    assert nvfp4.unpack(packed)[0, :8].tolist() == [0, 0, 8, 7, 15, 0, 10, 6]
    assert scale[0, 1].item() == 1
    tiny = w.clone()
    tiny[0, 16:] = 1e-8  # C49: a scale that E4M3 would round to 0
    assert float(nvfp4.quantize(tiny, torch.tensor(1 / 448))[1].float().min()) == 2.0**-9
    wide = torch.tensor([1000.0, -1000.0])
    assert fp8.quantize(wide, torch.tensor(1.0), numerics="modelopt").tolist() == [448, -448]


@quick
@given(matrices())
def test_fake_quantize(x: Tensor) -> None:
    amax = base.amax(x)
    scale = fp8.scale_from_amax(amax)
    got = fp8.fake_quantize(x, scale)
    codes = fp8.quantize(x, scale, numerics="exact")
    assert got.dtype == x.dtype
    assert got.equal(fp8.dequantize(codes, scale, x.dtype))
    by_token = fp8.fake_quantize_per_token(x)
    assert all(t.equal(fp8.fake_quantize_per_token(r)) for t, r in zip(by_token, x, strict=True))

    scale_2 = nvfp4.weight_scale_2(amax)
    packed, block_scale = nvfp4.quantize(x, scale_2)
    expected = nvfp4.dequantize(packed, block_scale, scale_2, x.dtype).view(-1, 16)
    # Only where a block's scale underflows do weights (clamped) and activations (zero) part.
    block_amax = x.float().abs().view(-1, 16).amax(-1)
    same = (block_amax > 6 * scale_2 * 2.0**-9) | (block_amax == 0)
    got = nvfp4.fake_quantize(x.unsqueeze(0), scale_2).view(-1, 16)
    assert got[same].equal(expected[same])
    assert bool((got[block_amax < 6 * scale_2 * 2.0**-11] == 0).all())
