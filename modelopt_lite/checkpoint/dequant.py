"""Present an already quantized checkpoint as plain tensors, decoded one at a time.

Read: block FP8 as DeepSeek stores it, FP8 with a scale per tensor or per row (transformers,
modelopt), MXFP4 as gpt-oss stores it, every format of ``FORMATS`` in the modelopt dialect, with
scales of input channels and low-rank factors or without, and in that of compressed-tensors FP8,
NVFP4, MXFP4, MXFP8, and integers of 4 and 8 bits, packed or not; our own exports are among them.
Any other quantized source is refused while only headers have been read.

Sources: transformers 5.14.1 ``integrations/{finegrained_fp8,mxfp4}.py`` for the first and the
third; the package compressed-tensors 0.20.1; Model Optimizer 0.47's exports.
"""

from __future__ import annotations

import copy
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from modelopt_lite.checkpoint.compressed import compressed_layouts
from modelopt_lite.checkpoint.header import TensorInfo
from modelopt_lite.checkpoint.layouts import (
    MXFP4_BLOCKS,
    QUANT_KEYS,
    Encoded,
    Integers,
    check_beside,
    decoded_shape,
    find_layouts,
    find_quantization,
    refuse_foreign,
)
from modelopt_lite.checkpoint.reader import Checkpoint, check_out
from modelopt_lite.checkpoint.table import TensorTable
from modelopt_lite.dialects.compressed_tensors import CompressedTensors
from modelopt_lite.errors import CheckpointError, NonFiniteError
from modelopt_lite.formats import e8m0, fp8, fp8_block, mxfp4, packed
from modelopt_lite.formats.linear import FORMATS
from modelopt_lite.formats.smoothed import unsmoothed
from modelopt_lite.words import counted

_MODEL_DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float64": torch.float64,
}
_KV_SCALE = re.compile(r"(^|[._])((q|k|v|kv|prob)_scale|[kv]_proj\.(output_scale|[kv]_bias))$")
_INPUT_SCALE = re.compile(r"[._](input_scale|activation_scale|input_global_scale)$")


class DequantizedSource:
    """A quantized checkpoint behind the reading interface of ``Checkpoint``.

    Attributes:
        base: The checkpoint as it lies on disk.
        config: Its config without the quantization sections, at every level.
        quantization: The section that was found.
        tensors: The presented tensors, in the order of their codes on disk. A decoded one has
            the model's dtype, its decoded shape, and the place of its codes.
        encoded: How each decoded tensor is stored.
        consumed: The tensors on disk that each decoded one is made of.
        dropped: Tensors on disk that are not presented, each with the reason. ``tensors`` that
            are not in ``consumed``, the values of ``consumed``, and these are all of ``base``.

    Raises:
        UnsupportedSourceError: The source is quantized in a way that is not read here.
        CheckpointError: A code tensor lacks its scale, their shapes disagree, or the config states
            a dtype that no model runs in.
    """

    def __init__(self, base: Checkpoint, quantization: Mapping[str, Any]) -> None:
        self.base = base
        self.quantization = dict(quantization)
        self.config: dict[str, Any] = _without_quantization(base.config)
        self.dtype = model_dtype(base.config)
        self.encoded: dict[str, Encoded] = dict(self._layouts())
        self.consumed = {name: (e.codes, *e.others) for name, e in self.encoded.items()}
        self.dropped: dict[str, str] = {}
        self.tensors = TensorTable(self._present())

    def __enter__(self) -> DequantizedSource:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def path(self) -> Path:
        """The checkpoint's folder."""
        return self.base.path

    @property
    def notes(self) -> list[str]:
        """See ``Checkpoint.notes``; and that the source is quantized, how, and what that costs."""
        kinds = (self.quantization.get("quant_method"), self.quantization.get("quant_algo"))
        how = " ".join(str(kind) for kind in kinds if kind)
        decoded = counted(len(self.encoded), "tensor")
        scales = f"; {counted(len(self.dropped), 'scale')} of inputs and KV cache left behind"
        kept = " (NVFP4 without a search keeps the codes of MXFP4, docs/numerics.md)"
        note = (
            f"the source is quantized already ({how}): {decoded} decoded to "
            f"{str(self.dtype).removeprefix('torch.')}, and what the recipe selects rounded a "
            f"second time{kept if self._has_mxfp4 else ''}{scales if self.dropped else ''}; give "
            "the original checkpoint if there is one"
        )
        return [note, *self.base.notes]

    @property
    def bytes_read(self) -> int:
        """Bytes read from disk so far."""
        return self.base.bytes_read

    @property
    def reads(self) -> Counter[str]:
        """How often each tensor on disk was read."""
        return self.base.reads

    @property
    def total_bytes(self) -> int:
        """Bytes of the tensors on disk, which are fewer than those of the presented ones."""
        return self.base.total_bytes

    @cached_property
    def input_scales(self) -> dict[str, float]:
        """Static activation scales by module (``….q_proj``, ``….experts.gate_up_proj``)."""
        scales = {}
        for name in self.dropped:
            if (match := _INPUT_SCALE.search(name)) and self.base.tensors[name].numel == 1:
                value = self.base.read(name).float().reshape(())
                if match[1] == "input_global_scale":  # one over the scale
                    value = value.reciprocal()
                scales[name[: match.start()]] = float(value)
        return scales

    def fingerprint(self) -> str:
        """See ``Checkpoint.fingerprint``."""
        return self.base.fingerprint()

    def close(self) -> None:
        """See ``Checkpoint.close``."""
        self.base.close()

    def read(self, name: str, out: Tensor | None = None) -> Tensor:
        """Read one tensor into host memory, decoded; see ``Checkpoint.read``.

        Memory beyond the result: the codes, the scales, and float32 temporaries of the format.

        Raises:
            NonFiniteError: An MXFP4 scale is NaN. Other formats pass a NaN on in the values.
        """
        encoded = self.encoded.get(name)
        if encoded is None:
            return self.base.read(name, out)
        info = self.tensors[name]
        if out is not None:
            check_out(out, info)
        codes = self.base.read(encoded.codes)
        scales = [self.base.read(scale) for scale in encoded.scales]
        if encoded.smoothing is None and not encoded.factors:
            value = _decode(info, encoded, codes, scales)
        else:
            whole = _decode(replace(info, dtype=torch.float32), encoded, codes, scales)
            stack = whole.ndim == 3  # [E, in, out]: what stays a stack in this dialect is one
            value = unsmoothed(whole, *self.beside(name), input_major=stack).to(info.dtype)
        if out is None:
            return value.contiguous()
        out.detach().copy_(value.reshape(out.shape))
        return out

    def read_rows(self, name: str, rows: range) -> Tensor:
        """Read some rows of a tensor: of a matrix that has to be decoded, all are read."""
        if name not in self.encoded:
            return self.base.read_rows(name, rows)
        if not self.by_rows(name):
            return self.read(name)[rows.start : rows.stop].clone()
        encoded, info = self.encoded[name], self.tensors[name]
        codes, *scales = (self.base.read_rows(n, rows) for n in (encoded.codes, *encoded.scales))
        part = replace(info, shape=(len(rows), *info.shape[1:]))
        return _decode(part, encoded, codes, scales).contiguous()

    def by_rows(self, name: str) -> bool:
        """Whether `read_rows` reads no more than the rows: each matrix of a stack has own scales.

        Low-rank factors and scales of channels are not read in part.
        """
        encoded = self.encoded.get(name)
        if encoded is None:
            return True
        if encoded.factors or encoded.smoothing or encoded.integers is not None:
            return False
        count, *inner = self.tensors[name].shape
        scales = [self.base.tensors[scale].shape for scale in encoded.scales]
        return len(inner) == 2 and all(len(s) > 0 and s[0] == count for s in scales)

    def stored(self, name: str) -> tuple[TensorInfo, ...]:
        """Return the tensors on disk that a tensor is read from."""
        return tuple(self.base.tensors[part] for part in self.consumed.get(name, (name,)))

    def beside(self, name: str) -> tuple[Tensor | None, tuple[Tensor, ...]]:
        """Read the scale of input channels and the factors of a decoded tensor; see `Encoded`."""
        encoded = self.encoded[name]
        scale = None if encoded.smoothing is None else self.base.read(encoded.smoothing)
        return scale, tuple(self.base.read(factor) for factor in encoded.factors)

    def powers(self, name: str, input_major: bool) -> Tensor | None:
        """Read the exponents of a decoded tensor's MXFP4 blocks.

        Args:
            name: The tensor.
            input_major: It is a stack [E, in, out], not [E, out, in], or a matrix [in, out].

        Returns:
            int16 [(E,) out, in / 32]; None where it lies in another format, where the blocks do
            not run along ``in``, or where more than codes and powers of two makes its values.
        """
        encoded = self.encoded.get(name)
        if encoded is None or encoded.smoothing is not None or encoded.factors:
            return None
        in_blocks = encoded.format == MXFP4_BLOCKS  # of [out, in], presented as [in, out]
        if not _is_mxfp4(encoded) or (encoded.turned or in_blocks) != input_major:
            return None
        scale = self.base.read(encoded.scales[0])
        return (scale.mT if encoded.turned else scale).short() - e8m0.BIAS

    @property
    def _has_mxfp4(self) -> bool:
        return any(_is_mxfp4(encoded) for encoded in self.encoded.values())

    def _layouts(self) -> Iterator[tuple[str, Encoded]]:
        if self.quantization.get("quant_method") == CompressedTensors.name:
            return compressed_layouts(self.base, self.quantization, self.dtype)
        return find_layouts(self.base, self.quantization)

    def _present(self) -> Iterator[TensorInfo]:
        decoded = {encoded.codes: name for name, encoded in self.encoded.items()}
        scales = {scale for encoded in self.encoded.values() for scale in encoded.others}
        for stored, info in self.base.tensors.items():
            if stored in decoded:
                name = decoded[stored]
                if name != stored and name in self.base.tensors:
                    raise CheckpointError(
                        f"{self.base.path}: holds both {name!r} and {stored!r}, two versions of "
                        "one tensor; remove one of them"
                    )
                shape = decoded_shape(self.base, self.encoded[name])
                check_beside(self.base, self.encoded[name], shape)
                yield TensorInfo(name, self.dtype, shape, info.file, info.start, info.end)
            elif _INPUT_SCALE.search(stored):
                self.dropped[stored] = "activation scale of the source's own quantization"
            elif _KV_SCALE.search(stored):
                self.dropped[stored] = "KV-cache scale or bias of the source's own quantization"
            elif stored not in scales:
                refuse_foreign(self.base, info, self.quantization)
                yield info


Source = Checkpoint | DequantizedSource


def open_source(path: Path, config: dict[str, Any] | None = None) -> Source:
    """Open a checkpoint folder; a quantized one is decoded on reading.

    Args:
        path: The folder.
        config: What stands for ``config.json``; None to read it.

    Raises:
        CheckpointError: As ``Checkpoint``; and codes without scales, or the reverse.
        UnsupportedSourceError: Quantized in a way that is not read here.
    """
    base = Checkpoint(path, config)
    quantization = find_quantization(base)
    if quantization is not None:
        return DequantizedSource(base, quantization)
    for info in base.tensors.values():
        refuse_foreign(base, info, {})
    return base


def model_dtype(config: Mapping[str, Any]) -> torch.dtype:
    """Return the dtype that a config states, at the top or in ``text_config``; else bfloat16.

    Raises:
        CheckpointError: It states one that no model runs in: an integer or an 8-bit float, a word
            that names none, or no text at all.
    """
    text = config.get("text_config")
    for section in (config, text if isinstance(text, dict) else {}):
        for key in ("dtype", "torch_dtype"):
            stated = section.get(key)
            if stated in (None, "auto"):
                continue
            dtype = _MODEL_DTYPES.get(str(stated).removeprefix("torch."))
            if dtype is None:
                raise CheckpointError(
                    f"config.json states {key} {stated!r}; write one that a model runs in: "
                    f"{', '.join(_MODEL_DTYPES)}"
                )
            return dtype
    return torch.bfloat16


def _without_quantization(config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: _without_quantization(value) if isinstance(value, dict) else copy.deepcopy(value)
        for key, value in config.items()
        if key not in QUANT_KEYS
    }


def _is_mxfp4(encoded: Encoded) -> bool:
    if encoded.format == MXFP4_BLOCKS:
        return True
    fmt = FORMATS.get(encoded.format)
    return fmt is not None and fmt.codec.element == "mxfp4"


def _decode(info: TensorInfo, encoded: Encoded, codes: Tensor, scales: list[Tensor]) -> Tensor:
    scale = scales[0]
    if encoded.format == MXFP4_BLOCKS:
        if bool((scale == 255).any()):
            raise NonFiniteError(
                f"{info.file}: scale {encoded.scales[0]!r} holds a NaN (byte 255); the source is "
                "damaged, download or save it again"
            )
        return mxfp4.dequantize_groups(codes, scale, info.dtype, input_major=True)
    if encoded.block is not None:
        return fp8_block.dequantize(codes, scale.float(), encoded.block, info.dtype)
    if encoded.format == "fp8":
        return fp8.dequantize(codes, scale.float().reshape(()), info.dtype)
    if encoded.format == "fp8_per_channel_per_token":
        # Of a stack [E, in, out] the rows of the matrices are the last axis.
        rows = scale.float().unsqueeze(1) if codes.ndim == 3 else scale.float().reshape(-1, 1)
        return fp8.dequantize(codes, rows, info.dtype)
    if encoded.integers is not None:
        return _decode_integers(info, encoded.integers, codes, scales)
    fmt = FORMATS[encoded.format]
    stored = {"weight": codes, "weight_scale": scale}
    if len(scales) > 1:
        stored["weight_scale_2"] = scales[1]
    parts = encoded.dialect.decode(fmt, stored)
    return fmt.dequantize(parts, info.dtype, turned=encoded.turned)


def _decode_integers(
    info: TensorInfo, stored: Integers, codes: Tensor, scales: list[Tensor]
) -> Tensor:
    rows, columns = stored.shape
    scale, *more = scales
    scale_RG = scale.reshape(rows, -1) if scale.numel() > 1 else scale.reshape(1, 1).expand(rows, 1)
    zero = more[0] if stored.has_zero else None
    if stored.in_words:
        codes = packed.unpack(codes, columns, stored.bits)
        if zero is not None:  # neighbours of a word are rows here
            zero = packed.unpack(zero.mT.contiguous(), rows, stored.bits).mT
    if zero is not None:
        zero = zero.reshape(scale_RG.shape) if zero.numel() > 1 else zero.expand(scale_RG.shape)
    return packed.dequantize(codes, scale_RG, info.dtype, zero)
