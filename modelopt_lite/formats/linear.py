"""The number formats of linear layers: how weights are kept, and how inputs are rounded.

Shape letters: E experts, R or out rows, K or in columns. A matrix is [out, in]; a stack of matrices
is [E, out, in] or, ``input_major``, [E, in, out] as gpt-oss keeps it. Blocks run along ``in`` in
each case.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from modelopt_lite.errors import RecipeError
from modelopt_lite.formats import inputs
from modelopt_lite.formats.base import Numerics, TensorSpec, tiles
from modelopt_lite.formats.codecs import fp4, fp8, integer
from modelopt_lite.formats.codecs.base import Codec
from modelopt_lite.formats.errors import ErrorReport, ErrorSums
from modelopt_lite.formats.groups import GROUP_MULTIPLE, fits_groups
from modelopt_lite.formats.inputs import INPUTS, Inputs
from modelopt_lite.words import near


@dataclass(frozen=True, slots=True)
class LinearFormat:
    """What the plan, the exporter and the audit need to know of a number format.

    Attributes:
        name: The name in recipes and in ``FORMATS``.
        quant_algo: The name in the exported configuration.
        codec: How weights are kept.
        inputs: How inputs are rounded.
    """

    name: str
    quant_algo: str
    codec: Codec
    inputs: Inputs

    @property
    def group_size(self) -> int | None:
        """Elements that share a block scale, None without blocks."""
        return self.codec.block

    @property
    def family(self) -> str:
        """The name without a size of groups."""
        return self.name.removesuffix(f"_{self.group_size}") if self.codec.any_block else self.name

    def with_group_size(self, size: int) -> LinearFormat:
        """Return the format with other groups, itself where they have that size.

        Raises:
            RecipeError: Its groups have one size, or the asked one is no multiple of 8.
        """
        if size == self.group_size:
            return self
        if not self.codec.any_block or not fits_groups(size):
            fixed = f"a multiple of {GROUP_MULTIPLE}" if self.codec.any_block else self.group_size
            raise RecipeError(
                f"group_size {size} does not fit the format {self.name!r}: it must be {fixed}; "
                "change it, or leave it out"
            )
        name = f"{self.name}_{size}"
        return replace(self, name=name, codec=self.codec.with_block(size))

    @property
    def static_input(self) -> bool:
        """Whether the export has an ``input_scale``, so that calibration data is needed."""
        return self.inputs.static is not None

    @property
    def weight_bits(self) -> float:
        """Bits an element, block scales included."""
        return self.codec.bits

    def turns(self, input_major: bool, numerics: Numerics) -> bool:
        """Return whether a stack is quantized as the transpose of what lies on disk."""
        return input_major and not (numerics == "modelopt" and self.codec.stacks_as_stored)

    def problem(
        self,
        shape: tuple[int, ...],
        *,
        stacked_input_major: bool = False,
        numerics: Numerics = "exact",
    ) -> str | None:
        """Return why a matrix or stack of this shape cannot be quantized, None if it can."""
        if len(shape) not in (2, 3):
            return f"shape {list(shape)} is neither a matrix nor a stack of matrices"
        lead, rows, columns = _parts(shape, self.turns(stacked_input_major, numerics))
        for letter, size in (*(("E", e) for e in lead), ("R", rows), ("K", columns)):
            if size == 0:
                return f"{letter}=0: the matrix is empty"
        return self.codec.problem(rows, columns)

    def shares_amax(self, shape: tuple[int, ...], numerics: Numerics) -> bool:
        """Return whether matrices that an engine fuses are quantized with their common amax."""
        return self.codec.shares_amax(shape[-2], shape[-1], numerics)

    def tensors(
        self,
        shape: tuple[int, ...],
        *,
        stacked_input_major: bool = False,
        numerics: Numerics = "exact",
    ) -> tuple[TensorSpec, ...]:
        """Return the tensors on disk: weight, weight_scale, weight_scale_2, input_scale."""
        turn = self.turns(stacked_input_major, numerics)
        lead, rows, columns = _parts(shape, turn)
        specs = self.codec.tensors(lead, rows, columns, numerics)
        if turn:
            specs = tuple(
                TensorSpec(s.suffix, s.dtype, (*lead, s.shape[-1], s.shape[-2]))
                if len(s.shape) == len(shape)
                else s
                for s in specs
            )
        if self.static_input:
            return (*specs, TensorSpec("input_scale", torch.float32, ()))
        return specs

    def decoded_shape(
        self, codes: tuple[int, ...], *, stacked_input_major: bool = False
    ) -> tuple[int, ...]:
        """Return the shape of the matrix or stack that codes of a shape stand for."""
        lead, rows, columns = _parts(codes, stacked_input_major)
        *_, rows, columns = self.codec.matrix_shape((*lead, rows, columns))
        return (*lead, columns, rows) if stacked_input_major else (*lead, rows, columns)

    def quantize(
        self,
        w: Tensor,
        amax: Tensor | None,
        *,
        numerics: Numerics,
        input_major: bool = False,
        scale_dtype: torch.dtype = torch.float32,
        scale_amax: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """Return the tensors on disk but ``input_scale``, by suffix, contiguous.

        Args:
            w: [out, in], [E, out, in], or with ``input_major`` [E, in, out]; bfloat16, float16 or
                float32; read, never written.
            amax: float32 [], of all matrices that share the scale, where ``shares_amax``; None
                takes that of ``w``. Other formats ignore it.
            numerics: Which arithmetic.
            input_major: The last two axes of ``w`` are swapped, and so are those of the result.
            scale_dtype: float32 scales of one level are rounded up to numbers that it holds.
            scale_amax: What each scale stands for, float32, where it is not the largest magnitude
                under it: of each row (INT8) or block ([E,] R, B) of INT4 and NVFP4. Others ignore
                it.

        Raises:
            NonFiniteError: The amax is NaN or infinite.
            ShapeError: See ``problem``.
        """
        turn = self.turns(input_major, numerics)
        tensors = self.codec.quantize(
            _oriented(w, turn),
            amax,
            numerics=numerics,
            scale_dtype=scale_dtype,
            scale_amax=scale_amax,
        )
        return {k: t.contiguous() for k, t in _all_oriented(tensors, w.ndim, turn).items()}

    def dequantize(
        self, tensors: Mapping[str, Tensor], dtype: torch.dtype, *, turned: bool = False
    ) -> Tensor:
        """Return the values of what ``quantize`` gave, in the layout of its ``w``.

        Args:
            tensors: By suffix.
            dtype: Of the result.
            turned: Blocks run along the last axis but one; what ``turns`` said.
        """
        parts = _all_oriented(tensors, tensors["weight"].ndim, turned)
        return _oriented(self.codec.dequantize(parts, dtype), turned).contiguous()

    def max_error(
        self,
        w: Tensor,
        tensors: Mapping[str, Tensor],
        *,
        numerics: Numerics,
        turned: bool = False,
    ) -> Tensor:
        """Return the largest float32 error of each element, of the shape of ``w``.

        It follows from ``w`` and the scales in ``tensors``; the formats' modules state it under
        ``error_bound``. A ``dtype`` other than float32 adds its own rounding. ``turned`` as for
        ``dequantize``.
        """
        parts = _all_oriented(tensors, w.ndim, turned)
        bound = self.codec.max_error(_oriented(w, turned), parts, numerics=numerics)
        return _oriented(bound, turned)

    def input_scale(self, amax: Tensor) -> Tensor:
        """Return the scale of the activations; see ``Inputs.scale``."""
        return self.inputs.scale(amax)

    def fake_quantize_input(self, x: Tensor, input_scale: Tensor | None) -> Tensor:
        """Return activations [..., in] as the engine's kernel rounds them."""
        return self.inputs.rounded(x, input_scale)


class _Formats(Mapping[str, LinearFormat]):
    """Formats by name; those whose groups may have any size also as ``name_size``."""

    def __init__(self, formats: Iterable[LinearFormat]) -> None:
        self._formats = {fmt.name: fmt for fmt in formats}
        self._regrouped: dict[str, LinearFormat] = {}

    def __getitem__(self, name: str) -> LinearFormat:
        if name in self._formats:
            return self._formats[name]
        if name not in self._regrouped:
            base, _, size = name.rpartition("_")
            fmt = self._formats.get(base)
            if fmt is None or not fmt.codec.any_block or not size.isdecimal():
                raise KeyError(name)
            self._regrouped[name] = fmt.with_group_size(int(size))
        return self._regrouped[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._formats)

    def __len__(self) -> int:
        return len(self._formats)


FORMATS: Mapping[str, LinearFormat] = _Formats(
    (
        LinearFormat("fp8", "FP8", fp8.PER_TENSOR, inputs.FP8),
        LinearFormat(
            "fp8_per_channel_per_token",
            "FP8_PER_CHANNEL_PER_TOKEN",
            fp8.PER_ROW,
            inputs.FP8_PER_TOKEN,
        ),
        # In lower case: TensorRT-LLM knows this spelling alone, the others do not mind.
        LinearFormat("fp8_2d_blockwise_weight_only", "fp8_pb_wo", fp8.BLOCKS, inputs.NONE),
        LinearFormat("int8", "W8A8_SQ_PER_CHANNEL", integer.INT8, inputs.INT8),
        LinearFormat(
            "int8_per_channel_per_token",
            "W8A8_SQ_PER_CHANNEL_PER_TOKEN_PLUGIN",  # TensorRT-LLM's name; the peer has none
            integer.INT8,
            inputs.INT8_PER_TOKEN,
        ),
        LinearFormat("int8_weight_only", "W8A16", integer.INT8, inputs.NONE),
        LinearFormat("int4_weight_only", "W4A16_AWQ", integer.INT4, inputs.NONE),
        LinearFormat("w4a8_awq", "W4A8_AWQ", integer.INT4_FOR_FP8, inputs.FP8),
        LinearFormat("nvfp4", "NVFP4", fp4.NVFP4, inputs.NVFP4),
        LinearFormat("nvfp4_four_over_six", "NVFP4", fp4.NVFP4_FOR_FOUR_OVER_SIX, inputs.NVFP4),
        LinearFormat("w4a16_nvfp4", "W4A16_NVFP4", fp4.NVFP4, inputs.NONE),
        LinearFormat("w4a16_nvfp4_32", "W4A16_NVFP4", fp4.NVFP4_OF_32, inputs.NONE),
        LinearFormat("w4a8_nvfp4_fp8", "W4A8_NVFP4_FP8", fp4.NVFP4_FOR_FP8, inputs.FP8),
        LinearFormat("mxfp8", "MXFP8", fp8.MXFP8, inputs.MXFP8),
        LinearFormat("mxfp4", "mxfp4", fp4.MXFP4, inputs.MXFP4),
        LinearFormat("w4a16_mxfp4", "mxfp4", fp4.MXFP4, inputs.NONE),
        LinearFormat("w4a8_mxfp4_fp8", "W4A8_MXFP4_FP8", fp4.MXFP4, inputs.FP8),
        # What the peer's preset amounts to: it is not calibrated, and so has no input_scale.
        LinearFormat("w4a8_mxfp4_fp8_dynamic", "W4A8_MXFP4_FP8", fp4.MXFP4, inputs.FP8_AT_RUN_TIME),
    )
)
"""Every format by name; iteration leaves out those of other group sizes, ``name_size``."""


def get_format(name: str) -> LinearFormat:
    """Return a format by the name that recipes call it.

    Raises:
        RecipeError: There is no such format.
    """
    if name not in FORMATS:
        known = ", ".join(sorted(FORMATS))
        raise RecipeError(f"unknown format {name!r}{near(name, FORMATS)}; known: {known}")
    return FORMATS[name]


def with_inputs(fmt: LinearFormat, name: str) -> LinearFormat:
    """Return the format that keeps weights as one does and rounds inputs as asked.

    Args:
        fmt: The format of the weights.
        name: A key of ``INPUTS``.

    Raises:
        RecipeError: No such rounding, or no format of both.
    """
    if name not in INPUTS:
        raise RecipeError(
            f"unknown inputs {name!r}{near(name, INPUTS)}; known: {', '.join(INPUTS)}"
        )
    alike = [fmt, *(f for f in FORMATS.values() if f.codec.element == fmt.codec.element)]
    found = next((f for f in alike if f.inputs == INPUTS[name]), None)
    if found is None:
        possible = [key for key, value in INPUTS.items() if any(f.inputs == value for f in alike)]
        raise RecipeError(
            f"no format has the weights of {fmt.name!r} and the inputs {name!r}; with these "
            f"weights inputs can be: {', '.join(possible)}"
        )
    return found.with_group_size(fmt.group_size or 0) if found.codec.any_block else found


def measure_error(
    fmt: LinearFormat,
    w: Tensor,
    tensors: Mapping[str, Tensor],
    *,
    numerics: Numerics,
    turned: bool = False,
    chosen: bool = False,
    angle: bool = False,
) -> ErrorReport:
    """Compare what ``fmt.quantize`` gave with its source, a few rows at a time.

    Args:
        fmt: The format.
        w: As for ``fmt.quantize``.
        tensors: weight and its scales, by suffix; others are ignored.
        numerics: The arithmetic that made ``tensors``; ``modelopt`` if unknown, its bound is wider.
        turned: As for ``fmt.dequantize``.
        chosen: Scales were chosen by a search, and may clip: the bound is that of
            ``Codec.clipping_error``.
        angle: Measure the cosine, too, for which every value is multiplied once more.
    """
    sums = ErrorSums(angle=angle)
    codec, kept = fmt.codec, {k: v for k, v in tensors.items() if k != "input_scale"}
    for w_RK, parts in _matrices(w, kept, turned):
        for rows, columns in tiles(w_RK, codec.row_multiple, codec.column_multiple):
            part = codec.tile(parts, rows, columns)
            source = w_RK[rows, columns].float()
            exact = chosen or numerics == "exact"  # then the dtype of w does not matter
            seen = source if exact else w_RK[rows, columns]
            if chosen:
                bound = codec.clipping_error(seen, part)
            else:
                bound = codec.max_error(seen, part, numerics=numerics)
            sums.add(source, codec.dequantize(part, torch.float32), bound)
    return sums.report()


def _matrices(
    w: Tensor, tensors: Mapping[str, Tensor], turned: bool
) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
    """Yield each [out, in] matrix of ``w`` and its tensors, rows first."""
    parts = _all_oriented(tensors, w.ndim, turned)
    if w.ndim == 2:
        yield _oriented(w, turned), parts
        return
    for e, w_RK in enumerate(_oriented(w, turned)):
        yield w_RK, {k: v[e] if v.ndim else v for k, v in parts.items()}


def _all_oriented(tensors: Mapping[str, Tensor], ndim: int, turn: bool) -> dict[str, Tensor]:
    """Swap the last two axes of the tensors that have as many axes as the weight."""
    return {k: _oriented(t, turn and t.ndim == ndim) for k, t in tensors.items()}


def _oriented(t: Tensor, turn: bool) -> Tensor:
    return t.transpose(-1, -2) if turn else t


def _parts(shape: tuple[int, ...], stacked_input_major: bool) -> tuple[tuple[int, ...], int, int]:
    """Return (leading axes, output channels, input channels) of a shape."""
    *lead, out, columns = shape
    return (tuple(lead), columns, out) if stacked_input_major else (tuple(lead), out, columns)
