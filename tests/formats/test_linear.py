"""The interface of linear formats: shapes on disk, stacks, refusals."""

from __future__ import annotations

import math
import threading

import pytest
import torch
from torch import Tensor

from modelopt_lite.errors import InternalError, NonFiniteError, ShapeError
from modelopt_lite.formats import base, fp8, nvfp4
from modelopt_lite.formats.linear import FORMATS, measure_error

NAMES = sorted(FORMATS)


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3)).bfloat16()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("shape", "input_major"), [((24, 256), False), ((3, 24, 256), False), ((3, 256, 24), True)]
)
def test_tensors_are_as_announced(name: str, shape: tuple[int, ...], input_major: bool) -> None:
    fmt = FORMATS[name]
    w = random(*shape)
    assert fmt.problem(shape, stacked_input_major=input_major) is None
    specs = {s.suffix: s for s in fmt.tensors(shape, stacked_input_major=input_major)}
    assert list(specs) == [
        s for s in ("weight", "weight_scale", "weight_scale_2", "input_scale") if s in specs
    ]
    assert ("input_scale" in specs) is fmt.static_input
    tensors = fmt.quantize(w, None, numerics="exact", input_major=input_major)
    assert set(tensors) == set(specs) - {"input_scale"}
    for suffix, tensor in tensors.items():
        assert (tensor.dtype, tuple(tensor.shape)) == (specs[suffix].dtype, specs[suffix].shape)
        assert tensor.is_contiguous()
    value = fmt.dequantize(tensors, torch.float32, turned=input_major)
    assert value.shape == w.shape
    bound = fmt.max_error(w, tensors, numerics="exact", turned=input_major)
    assert bool(((value - w.float()).abs() <= bound).all())
    report = measure_error(fmt, w, tensors, numerics="exact", turned=input_major)
    assert 0.5 < report.worst <= 1
    assert 0.002 < report.relative < 0.15


@pytest.mark.parametrize("name", NAMES)
def test_input_major_is_the_transpose(name: str) -> None:
    fmt = FORMATS[name]
    w = random(3, 256, 24)
    amax = base.amax(w)
    stacked = fmt.quantize(w, amax, numerics="exact", input_major=True)
    for e in range(3):
        single = fmt.quantize(w[e].t(), amax, numerics="exact")
        for suffix, tensor in single.items():
            part = stacked[suffix] if tensor.ndim == 0 else stacked[suffix][e]
            part = part.t() if tensor.ndim == 2 else part
            assert part.float().equal(tensor.float().view(part.shape)), suffix


@pytest.mark.parametrize("name", NAMES)
def test_zero_weight(name: str) -> None:
    """C48: a scale that divides, codes 0, values exactly 0."""
    fmt = FORMATS[name]
    for numerics in ("exact", "modelopt"):
        tensors = fmt.quantize(torch.zeros(4, 256).bfloat16(), None, numerics=numerics)
        zero = 0x88 if "mxfp4" in name and numerics == "modelopt" else 0  # -0.0 twice
        assert bool((tensors["weight"].view(torch.uint8) == zero).all())
        assert not fmt.dequantize(tensors, torch.float32).any()
        # A byte is an exponent, and 0 is one of a number above zero.
        scales = [t for k, t in tensors.items() if k != "weight" and t.dtype != torch.uint8]
        assert all(bool((t.float() > 0).all()) for t in scales)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_non_finite_is_refused(name: str, bad: float) -> None:
    w = random(4, 256)
    w[1, 5] = bad
    with pytest.raises(NonFiniteError, match="NaN or infinity"):
        FORMATS[name].quantize(w, None, numerics="exact")
    if FORMATS[name].static_input:
        with pytest.raises(NonFiniteError):
            FORMATS[name].input_scale(torch.tensor(bad).abs())


@pytest.mark.parametrize("name", NAMES)
def test_damage_is_measured(name: str) -> None:
    """What the audit is for: a wrong scale, a transposed matrix, a NaN."""
    fmt = FORMATS[name]
    w = random(256, 256)
    tensors = fmt.quantize(w, None, numerics="exact")
    halved = {
        **tensors,
        "weight_scale": (tensors["weight_scale"].float() * 0.5).to(tensors["weight_scale"].dtype),
    }
    assert measure_error(fmt, w, halved, numerics="exact").worst > 1
    assert measure_error(fmt, w.t(), tensors, numerics="exact").worst > 1
    damaged = {k: t.clone() for k, t in tensors.items()}
    target = damaged["weight" if name.startswith("fp8") else "weight_scale"]
    if target.dtype == torch.float32:
        target.view(-1)[0] = float("nan")
    else:
        target.view(torch.uint8).view(-1)[0] = 0xFF if target.dtype == torch.uint8 else 0x7F
    assert not measure_error(fmt, w, damaged, numerics="exact").worst <= 1


def test_problems() -> None:
    assert FORMATS["nvfp4"].problem((8, 40)) == "K=40 is not a multiple of 16"
    assert FORMATS["nvfp4"].problem((2, 40, 16), stacked_input_major=True) is not None
    assert FORMATS["nvfp4"].problem((2, 16, 40), stacked_input_major=True) is None
    assert FORMATS["fp8"].problem((8, 40)) is None
    block = FORMATS["fp8_2d_blockwise_weight_only"]
    assert block.problem((8, 576)) == "K=576 is not a multiple of 128"
    assert block.problem((200, 128)) is None
    for name in NAMES:
        assert "R=0" in str(FORMATS[name].problem((0, 16)))
        assert "K=0" in str(FORMATS[name].problem((8, 0)))
        assert "E=0" in str(FORMATS[name].problem((0, 8, 16)))
        assert FORMATS[name].problem((16,)) is not None
    with pytest.raises(ShapeError, match="multiple of 16"):
        nvfp4.quantize(random(4, 24), torch.tensor(1.0))
    with pytest.raises(ShapeError, match="does not fit"):
        fp8.quantize(random(4, 24), torch.ones(3), numerics="exact")


def test_input_scales() -> None:
    amax = torch.tensor(5.0).bfloat16()
    assert float(FORMATS["fp8"].input_scale(amax)) == pytest.approx(5 / 448)
    assert float(FORMATS["nvfp4"].input_scale(amax)) == pytest.approx(5 / 2688)
    zero = torch.tensor(0.0)
    assert float(FORMATS["fp8"].input_scale(zero)) == 1
    assert float(FORMATS["nvfp4"].input_scale(zero)) == pytest.approx(1 / 448)
    for name in ("w4a16_nvfp4", "fp8_per_channel_per_token"):
        with pytest.raises(InternalError):
            FORMATS[name].input_scale(amax)
    with pytest.raises(InternalError):
        FORMATS["fp8"].fake_quantize_input(random(2, 16), None)
    x = random(2, 16)
    assert FORMATS["w4a16_nvfp4"].fake_quantize_input(x, None) is x


def test_amax() -> None:
    w = random(4, 32)
    assert base.amax(w).dtype == torch.float32
    assert base.amax(w).item() == w.float().abs().max().item()
    assert base.row_amax(w).equal(w.float().abs().amax(-1))
    assert base.amax(w[:0]).item() == 0
    w[2, 3] = float("nan")
    assert base.amax(w).isnan()
    assert base.row_amax(w).isnan().tolist() == [False, False, True, False]


# Where one arithmetic differs from the other on ordinary weights; docs/numerics.md says why.
DIFFERENT = {"fp8", "mxfp4", "w4a16_mxfp4", "w4a8_mxfp4_fp8", "w4a8_mxfp4_fp8_dynamic"}


@pytest.mark.parametrize("name", NAMES)
def test_the_two_arithmetics_differ_only_where_it_is_said(name: str) -> None:
    w = random(300, 512)
    w[:, ::7] = 0
    w[:, 1] = 1.75
    exact, peer = (FORMATS[name].quantize(w, None, numerics=n) for n in ("exact", "modelopt"))
    same = all(
        t.view(torch.uint8).equal(peer[k].view(torch.uint8)) if t.ndim else t == peer[k]
        for k, t in exact.items()
    )
    assert same == (name not in DIFFERENT)


def test_errors_are_measured_over_columns_that_are_cut() -> None:
    fmt = FORMATS["fp8_2d_blockwise_weight_only"]
    w = random(300, 2500)
    tensors = fmt.quantize(w, None, numerics="exact")
    pieces = [columns for _, columns in base.tiles(w, 128, 128)]
    assert len(set(map(str, pieces))) > 1
    report = measure_error(fmt, w, tensors, numerics="exact")
    error = (fmt.dequantize(tensors, torch.float32) - w.float()).abs()
    bound = fmt.max_error(w, tensors, numerics="exact").clamp_min(base.F32_TINY)
    assert report.worst == float((error / bound).max())
    relative = float(error.double().norm() / w.double().norm())
    assert report.relative == pytest.approx(relative, rel=1e-5)


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (300, 70), (129, 2000), (128, 300_001)])
@pytest.mark.parametrize("multiples", [(1, None), (128, None), (128, 128), (2, 16)])
def test_tiles_cover_each_element_once(
    rows: int, columns: int, multiples: tuple[int, int | None]
) -> None:
    w = torch.zeros(1, dtype=torch.uint8).expand(rows, columns)
    seen = torch.zeros(rows, columns, dtype=torch.uint8)
    for down, across in base.tiles(w, *multiples):
        seen[down, across] += 1
        assert down.start % multiples[0] == 0
        assert across.start % (multiples[1] or 1) == 0
    assert bool((seen == 1).all())


def test_scratch_is_a_threads_own() -> None:
    cpu = torch.device("cpu")
    first = base.scratch(2, 10, cpu)
    assert base.scratch(1, 20, cpu).data_ptr() == first.data_ptr()
    with torch.inference_mode():
        grown = base.scratch(2, 3_000_000, cpu)
        grown.fill_(1)
    grown.fill_(2)  # not a tensor of inference mode
    others: list[int] = []
    thread = threading.Thread(target=lambda: others.append(base.scratch(2, 10, cpu).data_ptr()))
    thread.start()
    thread.join()
    assert others != [grown.data_ptr()]


@pytest.mark.parametrize("shape", [(256,), (2, 128), (0,)])
def test_every_fp8_code_is_decoded(shape: tuple[int, ...]) -> None:
    codes = torch.arange(256, dtype=torch.uint8)[: math.prod(shape)].view(fp8.DTYPE).view(shape)
    value, right = fp8.decode(codes), codes.float()
    assert torch.equal(
        value.view(torch.int32)[~right.isnan()], right.view(torch.int32)[~right.isnan()]
    )
    assert torch.equal(value.isnan(), right.isnan())
    part = codes.view(-1)[3:200:2]
    assert torch.equal(fp8.decode(part).nan_to_num(-1), part.float().nan_to_num(-1))
