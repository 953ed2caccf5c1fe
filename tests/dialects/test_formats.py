"""What a dialect makes of each format's tensors, and back; decoded by formulas written out here."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from modelopt_lite.dialects.base import Dialect
from modelopt_lite.dialects.compressed_tensors import CompressedTensors
from modelopt_lite.dialects.engines import ENGINES, loading, verdict
from modelopt_lite.dialects.known import DIALECTS, dialect_names, make_dialect
from modelopt_lite.dialects.modelopt import ModelOpt
from modelopt_lite.dialects.schemes import Schemes, arguments
from modelopt_lite.errors import RecipeError
from modelopt_lite.formats import packed
from modelopt_lite.formats.base import rounded_up
from modelopt_lite.formats.cache import CACHE_FORMATS
from modelopt_lite.formats.linear import FORMATS, LinearFormat, measure_error

E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
REFUSED = {
    "nvfp4_four_over_six": "another global scale",
    "w4a16_nvfp4_32": "blocks of 16",
    "w4a8_awq": "one level of scales",
    "w4a8_nvfp4_fp8": "blocks of 16",
}
HELD = sorted(FORMATS.keys() - REFUSED.keys())
SHAPE = (160, 256)


def matrix(dtype: torch.dtype = torch.bfloat16) -> Tensor:
    w = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0))
    w[3] = 0
    w[:, 7] *= 100
    return w.to(dtype)


def stored_by(dialect: Dialect, fmt: LinearFormat, w: Tensor) -> dict[str, Tensor]:
    parts = fmt.quantize(w, None, numerics="exact", scale_dtype=dialect.scale_dtype)
    specs = dialect.tensors(fmt, fmt.tensors(SHAPE), SHAPE)
    stored = dialect.encode(fmt, parts, SHAPE)
    wanted = {spec.suffix: spec for spec in specs if dialect.part_of(spec.suffix) != "input_scale"}
    assert stored.keys() == wanted.keys()
    for suffix, tensor in stored.items():
        exact = tensor.to(wanted[suffix].dtype)
        assert tuple(tensor.shape) == wanted[suffix].shape
        assert torch.equal(exact.float(), tensor.float()), "a scale that its dtype does not hold"
        stored[suffix] = exact
    return stored


def unpacked_words(words: Tensor, bits: int) -> Tensor:
    columns = [((words >> (bits * at)) & ((1 << bits) - 1)) for at in range(32 // bits)]
    return torch.stack(columns, -1).flatten(1) - (1 << (bits - 1))


def nibbles(codes: Tensor) -> Tensor:
    each = torch.stack([codes & 15, codes >> 4], -1).flatten(1).long()
    return E2M1[each & 7] * torch.where(each > 7, -1.0, 1.0)


def decoded(stored: dict[str, Tensor], rows: int, columns: int) -> Tensor:
    """The values that the rules of the dialect give to its tensors, in float32."""
    scale = stored["weight_scale"]
    scale = torch.exp2(scale.float() - 127) if scale.dtype == torch.uint8 else scale.float()
    if "weight_global_scale" in stored:
        scale = scale / stored["weight_global_scale"]
    if "weight_shape" in stored:
        assert stored["weight_shape"].tolist() == [rows, columns]
        words = stored["weight_packed"]
        codes = unpacked_words(words, 32 * words.shape[1] // columns).float()
    elif "weight_packed" in stored:
        codes = nibbles(stored["weight_packed"])
    else:
        codes = stored["weight"].float()
    down = 128 if scale.shape[0] not in (1, rows) else -(-rows // scale.shape[0])
    across = columns // scale.shape[1] if scale.ndim > 1 else columns
    scale = scale.reshape(scale.shape[0], -1)
    scale = scale.repeat_interleave(down, 0)[:rows].repeat_interleave(across, 1)
    return codes * scale


@pytest.mark.parametrize("name", HELD)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_the_rules_of_the_dialect_give_the_values_that_we_read(
    name: str, dtype: torch.dtype
) -> None:
    fmt, w = FORMATS[name], matrix(dtype)
    dialect = CompressedTensors(dtype)
    stored = stored_by(dialect, fmt, w)
    expected = decoded(stored, *SHAPE)
    parts = dialect.decode(fmt, {dialect.part_of(k): v for k, v in stored.items()})
    assert torch.equal(fmt.dequantize(parts, torch.float32), expected)
    assert measure_error(fmt, w, parts, numerics="exact").worst <= 1
    assert dialect.decoded_shape(
        fmt,
        tuple(stored.get("weight_packed", stored.get("weight", w)).shape),
        stacked_input_major=False,
    ) == tuple(w.shape)


@pytest.mark.parametrize("name", HELD)
def test_codes_survive_a_second_rounding(name: str) -> None:
    fmt, dialect = FORMATS[name], CompressedTensors(torch.bfloat16)
    stored = stored_by(dialect, fmt, matrix())
    parts = dialect.decode(fmt, {dialect.part_of(k): v for k, v in stored.items()})
    again = dialect.encode(fmt, {k: v for k, v in parts.items() if k in fmt_parts(fmt)}, SHAPE)
    for suffix in {"weight", "weight_packed"} & stored.keys():
        assert torch.equal(again[suffix].float(), stored[suffix].float())


def fmt_parts(fmt: LinearFormat) -> set[str]:
    return {spec.suffix for spec in fmt.tensors(SHAPE)}


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_modelopt_keeps_parts_as_they_are(name: str) -> None:
    fmt, dialect = FORMATS[name], make_dialect("modelopt", torch.bfloat16)
    w = matrix()
    stored = stored_by(dialect, fmt, w)
    parts = fmt.quantize(w, None, numerics="exact")
    assert stored.keys() == parts.keys()
    assert all(torch.equal(stored[k].float(), parts[k].float()) for k in parts)
    assert dialect.problem(fmt, SHAPE) is None


@pytest.mark.parametrize("name", HELD)
def test_a_format_is_known_again_by_its_numbers(name: str) -> None:
    fmt = FORMATS[name]
    section = {"config_groups": {"group_0": {"targets": ["Linear"], **arguments(fmt)}}}
    [scheme] = Schemes.of(section).schemes
    assert scheme.known is not None
    assert scheme.known.name == name
    bits = {**arguments(fmt)["weights"], "num_bits": 3}
    other = {"config_groups": {"group_0": {**section["config_groups"]["group_0"], "weights": bits}}}
    assert Schemes.of(other).formats_of("m") == ()


@pytest.mark.parametrize(("name", "rule"), sorted(REFUSED.items()))
def test_formats_without_a_compressor_are_refused(name: str, rule: str) -> None:
    problem = CompressedTensors().problem(FORMATS[name], SHAPE)
    assert problem is not None
    assert rule in problem


def test_what_else_the_dialect_cannot_hold() -> None:
    dialect = CompressedTensors()
    assert "matrices alone" in str(dialect.problem(FORMATS["fp8"], (4, 32, 64)))
    assert "4 columns in a word" in str(dialect.problem(FORMATS["int8_weight_only"], (8, 30)))
    assert dialect.problem(FORMATS["int8"], (8, 30)) is None
    assert dialect.cache_problem(CACHE_FORMATS["fp8"]) is None
    for name in ("fp8_cast", "fp8_affine", "nvfp4", "nvfp4_cast", "nvfp4_affine"):
        assert dialect.cache_problem(CACHE_FORMATS[name])


def test_targets_names_and_patterns() -> None:
    weights = arguments(FORMATS["fp8"])
    stated = Schemes.of(
        {
            "config_groups": {
                "a": {"targets": ["Linear"], **arguments(FORMATS["nvfp4"])},
                "b": {"targets": ["re:.*o_proj$"], **weights},
                "c": {"targets": ["m.gate"], **arguments(FORMATS["int8"])},
                "d": "FP8",
            },
            "ignore": ["lm_head", "re:.*vision.*"],
        }
    )
    found = [stated.formats_of(name)[0].name for name in ("m.q_proj", "m.o_proj", "m.gate")]
    assert found == ["nvfp4", "fp8", "int8"]
    assert [stated.ignores(n) for n in ("lm_head", "a.vision.b", "x.lm_head")] == [
        True,
        True,
        False,
    ]
    assert Schemes.of({"config_groups": []}).scheme_of("m") is None


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("columns", [1, 8, 21])
def test_words(bits: int, columns: int) -> None:
    codes = torch.arange(-(1 << (bits - 1)), 1 << (bits - 1), dtype=torch.int8)
    codes = codes.repeat(columns)[: 4 * columns].view(4, columns)
    words = packed.pack(codes, bits)
    assert words.dtype == torch.int32
    assert torch.equal(unpacked_words(words, bits)[:, :columns].to(torch.int8), codes)
    assert torch.equal(packed.unpack(words, columns, bits), codes)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_rounded_up(dtype: torch.dtype) -> None:
    scale = torch.rand(10_000, generator=torch.Generator().manual_seed(0)) * 10 + 1e-4
    up = rounded_up(scale, dtype)
    below = (up.to(dtype).view(torch.int16) - 1).view(dtype).float()
    assert torch.equal(up.to(dtype).float(), up)
    assert bool((up >= scale).all() and (below < scale).all())
    assert torch.equal(rounded_up(up, dtype), up)


def test_names_of_dialects() -> None:
    assert dialect_names("both") == tuple(DIALECTS) == ("modelopt", "compressed-tensors")
    assert dialect_names("modelopt") == ("modelopt",)
    assert dialect_names(["compressed-tensors"]) == ("compressed-tensors",)
    for asked in ("compresed-tensors", ["modelopt", "onnx"]):
        with pytest.raises(RecipeError, match="unknown dialect"):
            dialect_names(asked)
    with pytest.raises(RecipeError, match="did you mean 'compressed-tensors'"):
        dialect_names("compresed-tensors")
    for several in ([], ["modelopt", "modelopt"]):
        with pytest.raises(RecipeError, match="each dialect once"):
            dialect_names(several)


def test_verdicts() -> None:
    for dialect in DIALECTS:
        for fmt in FORMATS.values():
            for engine in ENGINES:
                found = verdict(engine, dialect, fmt)
                assert (found.answer == "loads") == (not found.rule)
    assert loading(ModelOpt.name, FORMATS["mxfp4"]) == []
    assert loading(ModelOpt.name, FORMATS["nvfp4"]) == ["vLLM", "SGLang", "TensorRT-LLM"]
    assert "transformers" in loading(CompressedTensors.name, FORMATS["mxfp4"])
    assert loading(ModelOpt.name, FORMATS["nvfp4"], "scale") == []
    assert loading(ModelOpt.name, FORMATS["nvfp4"], "factors") == []
    named = verdict("vLLM", ModelOpt.name, FORMATS["nvfp4"], beside="scale")
    assert (named.answer, "NVFP4_AWQ" in named.rule) == ("refused", True)
    by_name = verdict("SGLang", ModelOpt.name, FORMATS["nvfp4"], beside="scale")
    assert by_name.answer == "unknown"  # it takes the name
    blocks = verdict("vLLM", ModelOpt.name, FORMATS["w4a16_nvfp4_32"])
    assert blocks.answer == "refused"
    assert "16 elements, not 32" in blocks.rule
    static = FORMATS["int8"]
    assert verdict("vLLM", CompressedTensors.name, static).answer == "loads"
    assert verdict("vLLM", CompressedTensors.name, static, experts=True).answer == "refused"
    joined = verdict("transformers", CompressedTensors.name, FORMATS["fp8"], experts=True)
    assert joined.answer == "refused"
