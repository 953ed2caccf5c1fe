"""Round what an engine rounds while it runs a quantized checkpoint.

That is the inputs of matrices (`modelopt_lite.calibrate.rounding`), and keys and values as a cache
gives them back. A simulation: what the attention function gets is rounded, the query is not, and
every token is read from the cache, those of its own forward pass too.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor

from modelopt_lite.cache_scales import attention_layers
from modelopt_lite.calibrate.attention import watch_attention
from modelopt_lite.calibrate.rounding import InputRounding
from modelopt_lite.checkpoint.dequant import DequantizedSource
from modelopt_lite.errors import CheckpointError
from modelopt_lite.formats import fp8, nvfp4
from modelopt_lite.formats.cache import CACHE_FORMATS, CacheFormat, stated_cache
from modelopt_lite.job import Job
from modelopt_lite.models.specs import ptq_facts

# What scales are called: by us, by compressed-tensors, and by older writers.
_NAMES = (
    "{projection}.{letter}_scale",
    "{letter}_proj.{letter}_scale",
    "qkv_proj.{letter}_scale",
    "{letter}_scale",
    "attn.{letter}_scale",
    "{projection}.output_scale",
    "kv_scale",
)


def from_cache(
    fmt: CacheFormat, x: Tensor, scale: Tensor | None, bias: Tensor | None = None
) -> Tensor:
    """Return keys or values as a cache gives them back, in their dtype.

    Args:
        fmt: How they are kept.
        x: [B, heads, T, head_dim].
        scale: float32, largest magnitude over 448, [] or in FP8 [1, heads, 1, 1]; None to scale by
            1. NVFP4 has it for the scale of the whole, as Model Optimizer defines it for both, so
            blocks reach six times the largest magnitude.
        bias: [1, heads, 1, head_dim], of the affine formats: subtracted before, added behind.

    Raises:
        ShapeError: See `CacheFormat.problem`.
    """
    if bias is not None:
        return (from_cache(fmt, x.float() - bias.float(), scale) + bias.float()).to(x.dtype)
    scale = x.new_ones((), dtype=torch.float32) if scale is None else scale
    return fp8.fake_quantize(x, scale) if fmt.block is None else nvfp4.fake_quantize(x, scale)


@dataclass(frozen=True, slots=True)
class _Kept:
    """What belongs to the keys, or the values, of a layer."""

    scale: Tensor | None
    bias: Tensor | None


class CacheRounding:
    """Rounds the keys and values of every attention layer that calls transformers' functions.

    Other layers' keys and values are not seen, and stay as they are. Of latent attention (MLA) the
    heads are rounded, where engines keep the latent vector that heads are made of. Biases count
    where the format is an affine one: an engine that is told of FP8 alone subtracts none.

    Args:
        source: The quantized checkpoint.
        job: Its model, and how the two correspond.
        fmt: The format of its cache.

    Raises:
        CheckpointError: NVFP4 with several scales for a layer.
    """

    def __init__(self, source: DequantizedSource, job: Job, fmt: CacheFormat) -> None:
        self._source, self._job, self._format = source, job, fmt
        ptq = ptq_facts(job.plan.spec)
        self._kept: dict[str, tuple[_Kept, _Kept]] = {}
        for layer in attention_layers(job.model, job.plan.names, ptq):
            key, value = (
                self._read(layer.prefix, name, letter)
                for name, letter in zip(ptq.key_value_names, "kv", strict=True)
            )
            self._kept[layer.path] = (key, value)

    def watching(self) -> AbstractContextManager[None]:
        """Round while this context lasts."""
        return watch_attention(self._job.model, self.visit)

    def visit(self, module: str, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return keys and values [B, heads, T, head_dim] as the cache gives them back."""
        if module not in self._kept:
            return None
        of_key, of_value = self._kept[module]
        return self._rounded(module, key, of_key), self._rounded(module, value, of_value)

    def _rounded(self, module: str, x: Tensor, kept: _Kept) -> Tensor:
        problem = self._format.problem(x.shape[-1])
        if kept.scale is not None and kept.scale.ndim and kept.scale.shape[1] != x.shape[1]:
            problem = f"it has {kept.scale.shape[1]} scales for {x.shape[1]} heads"
        if problem:
            raise CheckpointError(
                f"{self._source.path}: the KV cache of {module!r} is {self._format.name}, and "
                f"{problem}; leave it alone with activations=False"
            )
        return from_cache(self._format, x, kept.scale, kept.bias)

    def _read(self, prefix: str, projection: str, letter: str) -> _Kept:
        base = self._source.base
        of_layer = (name.format(projection=projection, letter=letter) for name in _NAMES)
        names = (f"{prefix}.{name}" for name in of_layer)
        found = next((name for name in names if name in base.tensors), None)
        bias = f"{prefix}.{projection}.{letter}_bias"
        affine = self._format.affine and bias in base.tensors
        return _Kept(
            None if found is None else self._scale(found),
            base.read(bias).to(self._job.device) if affine else None,
        )

    def _scale(self, name: str) -> Tensor | None:
        """Return a scale, [] or [1, heads, 1, 1]; None for one that stands for none, <= 0."""
        scale = self._source.base.read(name).float().to(self._job.device).flatten()
        if not bool((scale > 0).all()):
            return None
        if len(scale) == 1:
            return scale.reshape(())
        if self._format.block is None:
            return scale.view(1, -1, 1, 1)
        raise CheckpointError(
            f"{self._source.path}: the scale {name!r} of the KV cache has {len(scale)} elements, "
            "and NVFP4 has one for a layer; leave the cache alone with activations=False"
        )


@dataclass(frozen=True, slots=True)
class Rounding:
    """What rounds as engines do: the inputs of matrices, and keys and values.

    Attributes:
        cache: None where the checkpoint states no cache of ours.
    """

    inputs: InputRounding
    cache: CacheRounding | None


def rounding_of(job: Job, *, activations: bool) -> Rounding | None:
    """Return what rounds as engines do; None where nothing does."""
    source = job.source
    if not activations or not isinstance(source, DequantizedSource):
        return None
    algo = stated_cache(source.quantization)
    fmt = next((fmt for fmt in CACHE_FORMATS.values() if fmt.algo == algo), None)
    return Rounding(
        InputRounding(source, job.plan.names, job.device),
        None if fmt is None else CacheRounding(source, job, fmt),
    )
