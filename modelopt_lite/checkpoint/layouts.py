"""Find out from names, dtypes and shapes how a quantized checkpoint stores each tensor.

Only configs and headers are looked at, so that what cannot be decoded is refused before any
weight is read. Layouts and their sources: see ``dequant``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from modelopt_lite.checkpoint.header import TensorInfo
from modelopt_lite.checkpoint.reader import Checkpoint, read_json
from modelopt_lite.dialects.base import Dialect
from modelopt_lite.dialects.modelopt import ModelOpt
from modelopt_lite.errors import CheckpointError, UnsupportedSourceError
from modelopt_lite.formats.declared import MIXED, OTHER_NAMES, Declared, is_turned, same_shape
from modelopt_lite.formats.linear import FORMATS, LinearFormat
from modelopt_lite.formats.smoothed import FACTORS, PEER_PREFIX, PRE_QUANT_SCALE

QUANT_KEYS = ("quantization_config", "compression_config")
MXFP4_BLOCKS = "mxfp4_blocks"
_MODELOPT_ALGOS = {
    *(None, MIXED, *OTHER_NAMES),
    *(fmt.quant_algo.upper() for fmt in FORMATS.values()),
}
# What the shape of the scale was already compared for, when the format was chosen.
_CHECKED = {"fp8_block", "fp8", "fp8_per_channel_per_token"}
MODELOPT = ModelOpt()
_CODE_DTYPES = {fmt.codec.code_dtype for fmt in FORMATS.values()}
_FP8_DTYPES = {torch.float8_e4m3fn, torch.float8_e5m2}
# Tensors that exist only in quantized checkpoints. One that is left when all known layouts are
# taken out belongs to a layout that is not read here.
_FOREIGN = re.compile(
    r"[._](weight_scale|weight_scale_2|weight_scale_inv|scale_inv|pre_quant_scale|weight_packed"
    r"|weight_global_scale|input_global_scale|weight_zero_point|weight_shape|qweight|qzeros"
    r"|g_idx|absmax|quant_map)$"
)
_FOREIGN_BYTES = re.compile(r"[._](blocks|scales)$")  # ordinary words, so only with a byte dtype


@dataclass(frozen=True, slots=True)
class Integers:
    """A matrix of integers.

    Attributes:
        bits: Of a code.
        shape: [R, K].
        in_words: Codes are packed into 32-bit words; else there is one to a byte.
        has_zero: Zero points follow the scale.
    """

    bits: int
    shape: tuple[int, ...]
    in_words: bool
    has_zero: bool


@dataclass(frozen=True, slots=True)
class Encoded:
    """How one presented tensor is stored.

    Attributes:
        format: ``fp8_block``, ``mxfp4_blocks``, ``integers``, or a key of ``FORMATS``.
        codes: Name on disk of the codes.
        scales: Names on disk of the scales, the block or row scale first.
        block: Rows and columns per scale; only ``fp8_block`` has them.
        turned: A stack [E, in, out] whose blocks run along ``in``.
        integers: How ``integers`` are stored.
        dialect: Reads the tensors of a format of ``FORMATS``.
        smoothing: Name on disk of the scale of its input channels, by which the codes' values are
            multiplied; None without one.
        factors: Names on disk of low-rank factors ``a`` and ``b``, whose product ``b @ a`` is added
            to the codes' values before that; empty without any.
        served: What an engine makes of inputs, too; None where the config states no format of ours.
    """

    format: str
    codes: str
    scales: tuple[str, ...]
    block: tuple[int, int] | None = None
    turned: bool = False
    integers: Integers | None = None
    dialect: Dialect = MODELOPT
    smoothing: str | None = None
    factors: tuple[str, ...] = ()
    served: LinearFormat | None = None

    @property
    def others(self) -> tuple[str, ...]:
        """What it is made of besides the codes."""
        smoothing = () if self.smoothing is None else (self.smoothing,)
        return (*self.scales, *smoothing, *self.factors)


def find_quantization(base: Checkpoint) -> dict[str, Any] | None:
    """Return the quantization section of ``config.json`` or ``hf_quant_config.json``, or None."""
    for section in _sections(base.config):
        for key in QUANT_KEYS:
            if section.get(key):
                if not isinstance(section[key], dict):
                    raise CheckpointError(f"{base.path / 'config.json'}: {key} is not an object")
                return dict(section[key])
    beside = base.path / "hf_quant_config.json"
    if not beside.exists():
        return None
    quantization = read_json(beside).get("quantization")
    if not isinstance(quantization, dict):
        raise CheckpointError(f"{beside}: has no object 'quantization'; restore the file")
    return {"quant_method": "modelopt", **quantization}


def _sections(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield a config and every config nested in it."""
    yield config
    for key, value in config.items():
        if isinstance(value, dict) and key not in QUANT_KEYS:
            yield from _sections(value)


def unsupported(base: Checkpoint, what: str) -> UnsupportedSourceError:
    """Return the error for a kind of quantization that is not read."""
    return UnsupportedSourceError(
        f"{base.path}: the source is quantized with {what}, which cannot be decoded exactly; give "
        "the original checkpoint, or one in FP8, MXFP4 (gpt-oss), or a format of the modelopt or "
        "compressed-tensors dialect"
    )


def refuse_foreign(base: Checkpoint, info: TensorInfo, quantization: Mapping[str, Any]) -> None:
    """Refuse a tensor that is left over although only a quantized checkpoint has such a one."""
    if info.dtype in _FP8_DTYPES:
        raise CheckpointError(
            f"{base.path}: tensor {info.name!r} holds FP8 codes but no scale for it was found; "
            "restore its scale tensor and the quantization_config of config.json"
        )
    packed = info.dtype == torch.uint8 and _FOREIGN_BYTES.search(info.name)
    if packed or _FOREIGN.search(info.name):
        method = quantization.get("quant_method", "no method in its config")
        raise unsupported(base, f"{method} and the tensor {info.name!r}")


def find_layouts(
    base: Checkpoint, quantization: Mapping[str, Any]
) -> Iterator[tuple[str, Encoded]]:
    """Yield presented names with their layouts; dispatch on the method once, for all tensors.

    That of compressed-tensors has a module of its own, `checkpoint.compressed`.
    """
    method = str(quantization.get("quant_method"))
    if method == "mxfp4":
        return _mxfp4_layouts(base)
    if method == "fp8":
        return _fp8_layouts(base, positive_pair(base, quantization.get("weight_block_size")))
    if method.startswith("modelopt"):
        declared = Declared.of(quantization)
        if declared.algo not in _MODELOPT_ALGOS:
            raise unsupported(base, f"{method} {declared.algo}")
        return _modelopt_layouts(base, declared)
    raise unsupported(base, method)


def positive_pair(base: Checkpoint, value: object) -> tuple[int, int] | None:
    """Return the rows and columns of a block that a config states; None where it states none."""
    if value is None:
        return None
    if (
        not isinstance(value, list)
        or len(value) != 2
        or not all(type(n) is int and n > 0 for n in value)
    ):
        raise CheckpointError(
            f"{base.path / 'config.json'}: weight_block_size {value!r} is not a pair of positive "
            "integers; repair the config"
        )
    return value[0], value[1]


def _fp8_layouts(base: Checkpoint, block: tuple[int, int] | None) -> Iterator[tuple[str, Encoded]]:
    for scale, info in base.tensors.items():
        codes = _codes_of(base, scale, ("_scale_inv", "_scale"))
        if codes is None or base.tensors[codes].dtype != torch.float8_e4m3fn:
            continue
        kind = fp8_kind(base, base.tensors[codes], info, block)
        yield codes, Encoded(kind, codes, (scale,), block if kind == "fp8_block" else None)


def _codes_of(base: Checkpoint, scale: str, suffixes: tuple[str, ...]) -> str | None:
    """Return the tensor that a scale's name belongs to, if there is one of that name."""
    for suffix in suffixes:
        if scale.endswith(suffix) and scale.removesuffix(suffix) in base.tensors:
            return scale.removesuffix(suffix)
    return None


def fp8_kind(
    base: Checkpoint, codes: TensorInfo, scale: TensorInfo, block: tuple[int, int] | None
) -> str:
    """Tell a scale's meaning from its shape.

    Where blocks are declared they come first: a grid of one block has the shape of a scalar, and
    decodes to the same.
    """
    if not scale.dtype.is_floating_point:
        raise unsupported(base, f"the integer scale {scale.name!r}")
    if block is not None and len(codes.shape) == 2:
        grid = tuple(-(-size // per) for size, per in zip(codes.shape, block, strict=True))
        if scale.shape == grid:
            return "fp8_block"
    if scale.numel == 1:
        return "fp8"
    rows = codes.shape[0] if len(codes.shape) == 2 else 0
    if scale.shape in {(rows,), (rows, 1)}:
        return "fp8_per_channel_per_token"
    if len(codes.shape) == 3 and scale.shape == (codes.shape[0], codes.shape[2]):
        return "fp8_per_channel_per_token"
    raise CheckpointError(
        f"{base.path}: scale {scale.name!r} of shape {list(scale.shape)} does not fit "
        f"{codes.name!r} of shape {list(codes.shape)}"
        + (f" in blocks of {list(block)}" if block else "")
        + "; save the checkpoint again"
    )


def _modelopt_layouts(base: Checkpoint, declared: Declared) -> Iterator[tuple[str, Encoded]]:
    """Pair ``X.weight`` with ``X.weight_scale``, and stacked ``X`` with ``X_weight_scale``."""
    for scale, info in base.tensors.items():
        codes = _codes_of(base, scale, ("_weight_scale", "_scale"))
        if codes is None:
            continue
        stored = base.tensors[codes]
        if stored.dtype not in _CODE_DTYPES:
            continue
        fmt = _modelopt_format(base, declared, stored, info)
        names = [scale]
        if len(fmt.codec.tensors((), 1, 1, "exact")) > 2:
            names.append(second := f"{scale}_2")
            if second not in base.tensors:
                raise CheckpointError(
                    f"{base.path}: tensor {codes!r} lacks {second!r}; restore the scale tensor"
                )
        turned = is_turned(fmt, stored.shape, info.shape, input_major=True)
        smoothing, factors = _beside(base, codes)
        yield (
            codes,
            Encoded(
                fmt.name,
                codes,
                tuple(names),
                turned=turned,
                smoothing=smoothing,
                factors=factors,
                served=fmt,
            ),
        )


def _beside(base: Checkpoint, codes: str) -> tuple[str | None, tuple[str, ...]]:
    """Return the names of the scale of input channels, and of the factors, that codes have."""
    stem = f"{codes.removesuffix('.weight')}{'.' if codes.endswith('.weight') else '_'}"
    smoothing = f"{stem}{PRE_QUANT_SCALE}"
    named = ([f"{stem}{prefix}{factor}" for factor in FACTORS] for prefix in ("", PEER_PREFIX))
    factors = next((names for names in named if not base.tensors.keys().isdisjoint(names)), [])
    for name in factors:
        if name not in base.tensors:
            raise CheckpointError(
                f"{base.path}: tensor {codes!r} lacks {name!r}; restore the factor"
            )
    return smoothing if smoothing in base.tensors else None, tuple(factors)


def _modelopt_format(
    base: Checkpoint, declared: Declared, codes: TensorInfo, scale: TensorInfo
) -> LinearFormat:
    """Return the format that the config states; where it states none, what dtypes and shapes say.

    Of FP8 without blocks the shape of the scale says whether it is one for a matrix or a row.
    """
    module = codes.name.removesuffix(".weight")
    found = [f for f in declared.formats_of(module) if f.codec.code_dtype == codes.dtype]
    if codes.dtype == torch.float8_e4m3fn and all(f.group_size is None for f in found):
        return FORMATS[fp8_kind(base, codes, scale, None)]
    if found:
        return found[0]
    if codes.dtype == torch.uint8 and declared.algo is None:
        return FORMATS["nvfp4"]
    raise CheckpointError(
        f"{base.path}: tensor {codes.name!r} holds {codes.dtype} codes, and the config states "
        f"{declared.algo} and no format of such codes for it; restore the config"
    )


def _mxfp4_layouts(base: Checkpoint) -> Iterator[tuple[str, Encoded]]:
    for codes, info in base.tensors.items():
        if codes.endswith("_blocks") and info.dtype == torch.uint8:
            name = codes.removesuffix("_blocks")
            scale = f"{name}_scales"
            if scale not in base.tensors:
                raise CheckpointError(
                    f"{base.path}: tensor {codes!r} lacks {scale!r}; restore the scale tensor"
                )
            yield name, Encoded(MXFP4_BLOCKS, codes, (scale,))


def decoded_shape(base: Checkpoint, encoded: Encoded) -> tuple[int, ...]:
    """Return the shape that codes decode to, after checking the scales' shapes against it."""
    codes = base.tensors[encoded.codes]
    scale = base.tensors[encoded.scales[0]]
    shape = codes.shape
    decoded: tuple[int, ...] = ()
    if encoded.format == MXFP4_BLOCKS:
        good = len(shape) == 4 and shape[3] == 16 and scale.shape == shape[:3]
        good = good and scale.dtype == torch.uint8
        decoded = (shape[0], shape[2] * 32, shape[1]) if good else decoded  # [E, in, out]
    elif encoded.format in _CHECKED:
        return shape
    elif encoded.integers is not None:
        return encoded.integers.shape
    else:
        fmt, dialect = FORMATS[encoded.format], encoded.dialect
        decoded = dialect.decoded_shape(fmt, shape, stacked_input_major=encoded.turned)
        good = fmt.problem(decoded, stacked_input_major=encoded.turned) is None
        parts = fmt.tensors(decoded, stacked_input_major=encoded.turned) if good else ()
        specs = dialect.tensors(fmt, parts, decoded) if good else ()
        for spec, name in zip(specs[1:], encoded.scales, strict=False):
            info = base.tensors[name]
            good = good and info.dtype == spec.dtype and same_shape(info.shape, spec.shape)
    if not good:
        raise CheckpointError(
            f"{base.path}: scale {scale.name!r} {scale.dtype} {list(scale.shape)} does not fit the "
            f"{encoded.format} codes {codes.name!r} of shape {list(shape)}; save the checkpoint "
            "again"
        )
    return decoded


def check_beside(base: Checkpoint, encoded: Encoded, shape: tuple[int, ...]) -> None:
    """Check the shapes of what stands beside codes against the shape that they decode to.

    Raises:
        CheckpointError: One does not fit.
    """
    *lead, rows, columns = (*shape[:-2], shape[-1], shape[-2]) if len(shape) == 3 else shape
    wanted: dict[str, tuple[int, ...]] = {}
    if encoded.smoothing is not None:
        wanted[encoded.smoothing] = (columns,)
    if encoded.factors:
        a, b = encoded.factors
        rank = (base.tensors[a].shape or (0,))[-2:][0]
        wanted |= {a: (*lead, rank, columns), b: (*lead, rows, rank)}
    for name, fitting in wanted.items():
        found = base.tensors[name]
        if found.shape != fitting or not found.dtype.is_floating_point:
            raise CheckpointError(
                f"{base.path}: {name!r} {found.dtype} {list(found.shape)} does not fit the matrix "
                f"{list(shape)} that it belongs to; save the checkpoint again"
            )
