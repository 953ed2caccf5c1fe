"""What a dialect is. Each has a file beside this one.

Formats make the same tensors whatever the dialect: ``weight``, ``weight_scale``, ``weight_scale_2``
and ``input_scale``, as many as they have. A dialect says what becomes of them on disk, and reads
them back. ``suffix`` is the last part of a tensor's name on disk; ``part`` is what it stands for.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from modelopt_lite.formats.base import Numerics, TensorSpec
from modelopt_lite.formats.cache import CacheFormat
from modelopt_lite.formats.linear import LinearFormat


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """What the config files of an export describe.

    Attributes:
        formats: Quantized module -> its format, in the order of the export.
        unquantized: Modules with a weight that a reader could take for a linear layer's, and that
            is left as it is.
        names_in_model: Module on disk -> its name in the model, where that is another.
        cache: Format of the key and value cache.
        numerics: "modelopt" keeps what Model Optimizer leaves out of its files.
        pre_quant_scale: Whether it is said of inputs that their channels have scales.
        rank: Of the low-rank factors that stand beside matrices; 0 without any.
    """

    formats: Mapping[str, LinearFormat]
    unquantized: Sequence[str]
    names_in_model: Mapping[str, str] = field(default_factory=dict)
    cache: CacheFormat | None = None
    numerics: Numerics = "exact"
    pre_quant_scale: bool = False
    rank: int = 0

    @property
    def distinct(self) -> list[LinearFormat]:
        """Each format once, in the order in which they appear."""
        return list({fmt.name: fmt for fmt in self.formats.values()}.values())


class Stated(Protocol):
    """What the configs of an export state about its modules."""

    @property
    def algo(self) -> str | None:
        """The name of the whole export's format in upper case, where the dialect has such names."""

    @property
    def algos(self) -> set[str]:
        """Every such name that is stated, those of modules too."""

    def algo_of(self, module: str) -> str | None:
        """Return the name of a module's format in upper case, where the dialect has such names."""

    def formats_of(self, module: str) -> tuple[LinearFormat, ...]:
        """Return the formats that a module may have, the likeliest first; none that is unknown."""


class Dialect(ABC):
    """How an export names, shapes and describes the tensors of quantized matrices.

    Attributes:
        name: As `quantize_and_export` takes it.
        scale_dtype: Of scales that are neither codes themselves nor the second of two levels. What
            is quantized for this dialect has scales that this dtype holds exactly.
        parts: Suffix on disk -> part, for those where the two differ.
        extra_files: Config files beside ``config.json``.
    """

    name: ClassVar[str]
    parts: ClassVar[Mapping[str, str]] = {}
    extra_files: ClassVar[tuple[str, ...]] = ()

    def __init__(self, model_dtype: torch.dtype = torch.float32) -> None:
        self.scale_dtype = self.scale_dtype_for(model_dtype)

    def scale_dtype_for(self, model_dtype: torch.dtype) -> torch.dtype:
        """Return ``scale_dtype`` in an export of a model that runs in a dtype."""
        return torch.float32

    @abstractmethod
    def problem(self, fmt: LinearFormat, shape: tuple[int, ...]) -> str | None:
        """Return the rule by which a matrix or stack of a format cannot be kept; None if it can."""

    @abstractmethod
    def cache_problem(self, cache: CacheFormat) -> str | None:
        """Return the rule by which a format of the cache cannot be kept; None if it can."""

    @abstractmethod
    def pre_quant_scale_problem(self, fmt: LinearFormat) -> str | None:
        """Return why a scale of each channel of inputs cannot stand beside a format, or None."""

    @abstractmethod
    def factors_problem(self, fmt: LinearFormat) -> str | None:
        """Return why low-rank factors of a matrix cannot stand beside a format, or None."""

    @abstractmethod
    def tensors(
        self, fmt: LinearFormat, parts: Sequence[TensorSpec], shape: tuple[int, ...]
    ) -> tuple[TensorSpec, ...]:
        """Return the tensors on disk.

        Args:
            fmt: The format.
            parts: What it makes of a matrix or stack, as ``LinearFormat.tensors`` gives it.
            shape: Of the matrix or stack.
        """

    @abstractmethod
    def encode(
        self, fmt: LinearFormat, parts: Mapping[str, Tensor], shape: tuple[int, ...]
    ) -> dict[str, Tensor]:
        """Return, by suffix, the tensors on disk of some or all parts; see ``tensors``."""

    @abstractmethod
    def decode(self, fmt: LinearFormat, stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the parts as ``LinearFormat.dequantize`` takes them; ``stored`` is by part."""

    @abstractmethod
    def decoded_shape(
        self, fmt: LinearFormat, codes: tuple[int, ...], *, stacked_input_major: bool
    ) -> tuple[int, ...]:
        """Return the shape of the matrix or stack that codes on disk of a shape stand for."""

    @abstractmethod
    def code_dtype(self, fmt: LinearFormat) -> torch.dtype:
        """Return the dtype of the codes on disk."""

    @abstractmethod
    def cache_scales(self, key: str, value: str) -> tuple[str, str]:
        """Return the names of the cache's scales, given the names of the two projections."""

    @abstractmethod
    def scalar_shape(self) -> tuple[int, ...]:
        """Return the shape of a scale for a whole matrix."""

    @abstractmethod
    def quantization_config(self, contents: Contents) -> dict[str, Any]:
        """Return the section ``quantization_config`` of ``config.json``."""

    def extra_configs(self, contents: Contents) -> dict[str, dict[str, Any]]:
        """Return the contents of ``extra_files``, by name."""
        return {}

    @abstractmethod
    def stated(self, section: Mapping[str, Any]) -> Stated:
        """Read a ``quantization_config`` back."""

    def part_of(self, suffix: str) -> str:
        """Return what a tensor on disk stands for."""
        return self.parts.get(suffix, suffix)
