"""What engines do to the inputs of a quantized layer: leave them, or round them to a format."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from modelopt_lite.errors import InternalError
from modelopt_lite.formats import fp8, integer, mxfp4, mxfp8, nvfp4
from modelopt_lite.formats.codecs.base import finite


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """How inputs [..., K] are rounded.

    Attributes:
        name: Of the rounding, for messages.
        bits: Bits an element; None where inputs are left alone.
        kind: What codes are.
        group_size: Elements that share a scale found at run time, None without such.
        scale_of: amax of the calibration -> ``input_scale``; None where no scale is static.
        static: Rounds with an ``input_scale``; None where no scale is static.
        dynamic: Rounds by what is in the inputs alone; None where a scale is static.
    """

    name: str
    bits: int | None = None
    kind: Literal["float", "int"] = "float"
    group_size: int | None = None
    scale_of: Callable[[Tensor], Tensor] | None = None
    static: Callable[[Tensor, Tensor], Tensor] | None = None
    dynamic: Callable[[Tensor], Tensor] | None = None

    @property
    def rounds(self) -> bool:
        """Whether inputs are rounded at all."""
        return self.static is not None or self.dynamic is not None

    def scale(self, amax: Tensor) -> Tensor:
        """Return float32 [], the ``input_scale``; an amax of 0 counts as the largest code.

        Raises:
            NonFiniteError: The amax is NaN or infinite.
            InternalError: The rounding has no static scale.
        """
        if self.scale_of is None:
            raise InternalError(f"inputs are {self.name}: no input_scale exists")
        return self.scale_of(finite(amax, "an activation"))

    def rounded(self, x: Tensor, input_scale: Tensor | None) -> Tensor:
        """Return inputs as the engine's kernel sees them, in the dtype of ``x``."""
        if self.static is not None:
            if input_scale is None:
                raise InternalError(f"{self.name} inputs need an input_scale, got None")
            return self.static(x, input_scale)
        return x if self.dynamic is None else self.dynamic(x)


NONE = Inputs(name="left alone")
FP8 = Inputs(name="FP8", bits=8, scale_of=fp8.scale_from_amax, static=fp8.fake_quantize)
INT8 = Inputs(
    name="INT8",
    bits=8,
    kind="int",
    scale_of=integer.int8_scale,
    static=integer.fake_quantize_int8,
)
INT8_PER_TOKEN = Inputs(
    name="INT8 by token", bits=8, kind="int", dynamic=integer.fake_quantize_int8_per_token
)
FP8_PER_TOKEN = Inputs(name="FP8 by token", bits=8, dynamic=fp8.fake_quantize_per_token)
FP8_AT_RUN_TIME = Inputs(name="FP8 at run time", bits=8, dynamic=fp8.fake_quantize_per_tensor)
MXFP4 = Inputs(name="MXFP4", bits=4, group_size=mxfp4.BLOCK, dynamic=mxfp4.fake_quantize)
MXFP8 = Inputs(name="MXFP8", bits=8, group_size=mxfp4.BLOCK, dynamic=mxfp8.fake_quantize)
NVFP4 = Inputs(
    name="NVFP4",
    bits=4,
    group_size=nvfp4.BLOCK,
    scale_of=nvfp4.weight_scale_2,
    static=nvfp4.fake_quantize,
)

INPUTS: Mapping[str, Inputs] = {
    "none": NONE,
    "fp8": FP8,
    "fp8_per_token": FP8_PER_TOKEN,
    "fp8_dynamic": FP8_AT_RUN_TIME,
    "int8": INT8,
    "int8_per_token": INT8_PER_TOKEN,
    "nvfp4": NVFP4,
    "mxfp4": MXFP4,
    "mxfp8": MXFP8,
}
"""Roundings by the names that recipes call them."""
