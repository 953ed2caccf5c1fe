"""The "compressed-tensors" dialect, as transformers, vLLM and SGLang read it.

Packed codes are called ``weight_packed``. Scales that stand for a whole matrix or row keep an axis;
those of one level have the model's dtype, which transformers casts them to as it loads. The second
of two levels is stored as its reciprocal: values are divided by it.

Source: the package compressed-tensors 0.20.1, ``compressors/`` and ``quantization/``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from modelopt_lite.dialects.base import Contents, Dialect
from modelopt_lite.dialects.schemes import Layout, Schemes, arguments, layout_of
from modelopt_lite.formats import fp8_block, nvfp4, packed
from modelopt_lite.formats.base import TensorSpec
from modelopt_lite.formats.cache import CacheFormat
from modelopt_lite.formats.codecs import fp8 as fp8_codecs
from modelopt_lite.formats.codecs import integer as integer_codecs
from modelopt_lite.formats.linear import LinearFormat

MIXED_FORMATS = "mixed-precision"
STATUS = "compressed"
_RECIPROCAL = frozenset({"weight_scale_2", "input_scale"})


class CompressedTensors(Dialect):
    """Names, shapes and config of the package compressed-tensors."""

    name = "compressed-tensors"
    parts = {  # noqa: RUF012  a ClassVar of the base class
        "weight_packed": "weight",
        "weight_global_scale": "weight_scale_2",
        "input_global_scale": "input_scale",
    }

    def scale_dtype_for(self, model_dtype: torch.dtype) -> torch.dtype:
        """See `Dialect.scale_dtype_for`."""
        return model_dtype if model_dtype.itemsize == 2 else torch.float32

    def problem(self, fmt: LinearFormat, shape: tuple[int, ...]) -> str | None:
        """See `Dialect.problem`."""
        if len(shape) == 3:
            return "it holds matrices alone, and these experts are one tensor of the source"
        layout = layout_of(fmt)
        if layout is None and fmt.codec.kind == "int":
            return (
                "pack-quantized has one level of scales, and the format "
                f"{fmt.name!r} has a second, of the whole matrix"
            )
        if layout is None:
            size = fmt.group_size
            other = "another global scale" if size == nvfp4.BLOCK else f"blocks of {size}"
            return (
                "nvfp4-pack-quantized has blocks of 16 and a global scale of amax / 2688, and the "
                f"format {fmt.name!r} has {other}"
            )
        per_word = packed.WORD // layout.bits
        if layout.in_words and shape[-1] % per_word:
            return f"{layout.format} keeps {per_word} columns in a word, and K is {shape[-1]}"
        return None

    def cache_problem(self, cache: CacheFormat) -> str | None:
        """See `Dialect.cache_problem`."""
        if cache.algo != "FP8" or cache.affine:
            return f"its kv_cache_scheme is FP8 with a scale, and {cache.name!r} is another format"
        if not cache.scaled:
            return "its kv_cache_scheme wants a scale for each layer; use the cache format 'fp8'"
        return None

    def pre_quant_scale_problem(self, fmt: LinearFormat) -> str | None:
        """See `Dialect.pre_quant_scale_problem`."""
        return "it has no tensor for scales of the channels of inputs"

    def factors_problem(self, fmt: LinearFormat) -> str | None:
        """See `Dialect.factors_problem`."""
        return "it has no tensors for low-rank factors that stand beside a matrix"

    def tensors(
        self, fmt: LinearFormat, parts: Sequence[TensorSpec], shape: tuple[int, ...]
    ) -> tuple[TensorSpec, ...]:
        """See `Dialect.tensors`."""
        layout = _layout(fmt)
        stored = []
        for part in parts:
            suffix = layout.suffix(part.suffix)
            one_level = part.dtype == torch.float32 and suffix == part.suffix
            dtype = self.scale_dtype if one_level else part.dtype
            stored.append(TensorSpec(suffix, dtype, _stored_shape(fmt, layout, part, shape)))
        if layout.in_words:
            stored[0] = TensorSpec("weight_packed", torch.int32, stored[0].shape)
            stored.append(TensorSpec("weight_shape", torch.int64, (2,)))
        return tuple(stored)

    def encode(
        self, fmt: LinearFormat, parts: Mapping[str, Tensor], shape: tuple[int, ...]
    ) -> dict[str, Tensor]:
        """See `Dialect.encode`."""
        layout = _layout(fmt)
        stored = {}
        for part, value in parts.items():
            suffix = layout.suffix(part)
            if part in _RECIPROCAL and suffix != part:
                largest = torch.finfo(torch.float32).max
                stored[suffix] = value.reciprocal().clamp_max(largest).reshape(1)
            elif part == "weight" and layout.in_words:
                stored[suffix] = packed.pack(_codes(fmt, value), layout.bits)
                stored["weight_shape"] = torch.tensor(shape, dtype=torch.int64)
            else:
                spec = TensorSpec(part, value.dtype, tuple(value.shape))
                stored[suffix] = value.reshape(_stored_shape(fmt, layout, spec, shape))
        return stored

    def decode(self, fmt: LinearFormat, stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """See `Dialect.decode`."""
        layout = _layout(fmt)
        parts = dict(stored)
        parts.pop("weight_shape", None)
        if layout.in_words:
            columns = parts["weight"].shape[1] * (packed.WORD // layout.bits)
            codes = packed.unpack(parts["weight"], columns, layout.bits)
            parts["weight"] = _in_pairs(codes) if fmt.codec.any_block else codes
        scale = parts["weight_scale"]
        if scale.dtype in (torch.bfloat16, torch.float16):
            scale = scale.float()
        if fmt.codec == fp8_codecs.PER_TENSOR:
            scale = scale.reshape(())
        elif fmt.codec in (fp8_codecs.PER_ROW, integer_codecs.INT8):
            scale = scale.reshape(-1)
        parts["weight_scale"] = scale
        for part in _RECIPROCAL & parts.keys():
            value = parts[part].float().reshape(())
            parts[part] = value.reciprocal() if layout.suffix(part) != part else value
            if part == "weight_scale_2":  # a product with the reciprocal rounds differently
                parts[nvfp4.DIVISOR] = value
        return parts

    def decoded_shape(
        self, fmt: LinearFormat, codes: tuple[int, ...], *, stacked_input_major: bool
    ) -> tuple[int, ...]:
        """See `Dialect.decoded_shape`."""
        layout = layout_of(fmt)
        if layout is not None and layout.in_words:
            return (*codes[:-1], codes[-1] * (packed.WORD // layout.bits))
        return fmt.decoded_shape(codes, stacked_input_major=stacked_input_major)

    def code_dtype(self, fmt: LinearFormat) -> torch.dtype:
        """See `Dialect.code_dtype`."""
        layout = layout_of(fmt)
        return torch.int32 if layout and layout.in_words else fmt.codec.code_dtype

    def cache_scales(self, key: str, value: str) -> tuple[str, str]:
        """See `Dialect.cache_scales`."""
        return f"{_parent(key)}.k_scale", f"{_parent(value)}.v_scale"

    def scalar_shape(self) -> tuple[int, ...]:
        """See `Dialect.scalar_shape`."""
        return (1,)

    def quantization_config(self, contents: Contents) -> dict[str, Any]:
        """See `Dialect.quantization_config`."""
        formats = contents.distinct
        groups = {
            f"group_{index}": {
                "targets": _targets(fmt, contents),
                **arguments(fmt),
                "output_activations": None,
                "format": _layout(fmt).format,
            }
            for index, fmt in enumerate(formats)
        }
        kinds = {group["format"] for group in groups.values()}
        ignore = _with_other_names(contents.unquantized, contents) if len(formats) == 1 else []
        cache = None
        if contents.cache is not None:
            cache = {"num_bits": 8, "type": "float", "strategy": "tensor"}
            cache |= {"dynamic": False, "symmetric": True}
        return {
            "config_groups": groups,
            "format": kinds.pop() if len(kinds) == 1 else MIXED_FORMATS if kinds else "dense",
            "global_compression_ratio": None,
            "ignore": ignore,
            "kv_cache_scheme": cache,
            "quant_method": self.name,
            "quantization_status": STATUS,
        }

    def stated(self, section: Mapping[str, Any]) -> Schemes:
        """See `Dialect.stated`."""
        return Schemes.of(section)


def _parent(module: str) -> str:
    return module.rpartition(".")[0]


def _layout(fmt: LinearFormat) -> Layout:
    layout = layout_of(fmt)
    assert layout is not None, f"{fmt.name} was not refused at plan time"
    return layout


def _stored_shape(
    fmt: LinearFormat, layout: Layout, part: TensorSpec, shape: tuple[int, ...]
) -> tuple[int, ...]:
    if part.suffix == "weight":
        if layout.in_words:
            return (shape[0], packed.words(shape[1], layout.bits))
        return part.shape
    if not part.shape:
        return (1,)
    if fmt.codec == fp8_codecs.BLOCKS:
        return fp8_block.grid_shape(shape[0], shape[1])
    return (*part.shape, 1) if len(part.shape) == 1 else part.shape


def _codes(fmt: LinearFormat, weight: Tensor) -> Tensor:
    """Codes of a matrix, int8 [R, K]; two rows of INT4 share a byte before."""
    if not fmt.codec.any_block:
        return weight
    pairs = weight.view(torch.int8)
    return torch.stack([(pairs << 4) >> 4, pairs >> 4], dim=1).view(-1, weight.shape[1])


def _in_pairs(codes_RK: Tensor) -> Tensor:
    """The reverse of `_codes` for INT4."""
    even, odd = codes_RK.view(-1, 2, codes_RK.shape[1]).unbind(1)
    return (even & 15).bitwise_or_(odd << 4).view(torch.uint8)


def _targets(fmt: LinearFormat, contents: Contents) -> list[str]:
    """All linear layers where they share a format, else the modules by name."""
    if len(contents.distinct) == 1:
        return ["Linear"]
    named = [name for name, other in contents.formats.items() if other.name == fmt.name]
    return _with_other_names(named, contents)


def _with_other_names(modules: Sequence[str], contents: Contents) -> list[str]:
    """Names on disk, by which engines go, and those in transformers' model where they differ."""
    others = (contents.names_in_model.get(name, name) for name in modules)
    return list(dict.fromkeys((*modules, *others)))
