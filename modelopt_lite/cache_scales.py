"""Which attention layers' key and value caches get scales, and under which names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from modelopt_lite.calibrate.attention import check_watched
from modelopt_lite.checkpoint.names import NameMap
from modelopt_lite.errors import RecipeError
from modelopt_lite.formats.cache import CacheFormat
from modelopt_lite.models.specs import PTQSpec
from modelopt_lite.offload.patterns import match_part
from modelopt_lite.offload.units import text_model
from modelopt_lite.select import Output
from modelopt_lite.structure import TensorShape


@dataclass(frozen=True, slots=True)
class KVCacheScale:
    """The scales of one attention layer's key and value cache, and the biases of affine formats."""

    module: str
    unit: str
    key: Output
    value: Output
    key_bias: Output | None = None
    value_bias: Output | None = None

    @property
    def outputs(self) -> list[Output]:
        """All of its tensors."""
        return [o for o in (self.key, self.value, self.key_bias, self.value_bias) if o is not None]


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """An attention layer of the text model.

    Attributes:
        path: Its module.
        prefix: What it is called on disk.
        target: A parameter of it.
    """

    path: str
    prefix: str
    target: str


def attention_layers(model: nn.Module, names: NameMap, ptq: PTQSpec) -> Iterator[AttentionLayer]:
    """Find every attention layer: it has key and value projections, or is called an attention.

    Latent attention (MLA) has no such projections.
    """
    key_name, value_name = ptq.key_value_names
    inside = set(text_model(model).modules())
    for path, module in model.named_modules():
        if module not in inside:
            continue
        children = dict(module.named_children())
        named = key_name in children and value_name in children
        if not named and not type(module).__name__.lower().endswith("attention"):
            continue
        linear = key_name if named else _first_linear(module)
        group = names.by_target.get(f"{path}.{linear}.weight")
        if group is not None and not _is_skipped(group.sources[0], ptq):
            prefix = group.sources[0].removesuffix(f".{linear}.weight")
            yield AttentionLayer(path, prefix, group.targets[0])


def find_caches(
    model: nn.Module,
    names: NameMap,
    tensors: Mapping[str, TensorShape],
    unit_of: Mapping[str, str],
    ptq: PTQSpec,
    fmt: CacheFormat,
) -> list[KVCacheScale]:
    """Return the scales of every attention layer; engines look for those of MLA's under its names.

    Raises:
        RecipeError: There is no such layer, one whose keys and values cannot be seen, one whose
            heads do not fit the format, or one that has no room for the biases of an affine format.
    """
    key_name, value_name = ptq.key_value_names
    found = []
    for layer in attention_layers(model, names, ptq):
        module = model.get_submodule(layer.path)
        check_watched(layer.path, module)
        scale = KVCacheScale(
            module=layer.path,
            unit=unit_of[layer.target],
            key=Output(f"{layer.prefix}.{key_name}.k_scale", torch.float32, ()),
            value=Output(f"{layer.prefix}.{value_name}.v_scale", torch.float32, ()),
        )
        sizes = (getattr(module, f"{name}head_dim", None) for name in ("", "qk_", "v_"))
        problems = (fmt.problem(size) for size in sizes if isinstance(size, int))
        if problem := next(filter(None, problems), None):
            raise RecipeError(
                f"the KV cache of {layer.path!r} cannot be {fmt.name}: {problem}; use kv_cache fp8"
            )
        if fmt.affine:
            scale = _with_biases(scale, module, layer.prefix, ptq, tensors)
        found.append(scale)
    if not found:
        raise RecipeError(
            f"the recipe asks for KV cache scales, but no module has {key_name!r} and "
            f"{value_name!r} or is an attention; leave kv_cache out"
        )
    return found


def _with_biases(
    scale: KVCacheScale,
    module: nn.Module,
    prefix: str,
    ptq: PTQSpec,
    tensors: Mapping[str, TensorShape],
) -> KVCacheScale:
    biases = []
    for name, letter in zip(ptq.key_value_names, "kv", strict=True):
        info, head_dim = tensors.get(f"{prefix}.{name}.weight"), getattr(module, "head_dim", None)
        if info is None or not isinstance(head_dim, int) or info.shape[0] % head_dim:
            raise RecipeError(
                f"{scale.module!r} ({type(module).__name__}) has no projection {name!r} of whole "
                "heads, so an affine KV cache has no bias for it; use kv_cache fp8 or nvfp4"
            )
        shape = (1, info.shape[0] // head_dim, 1, head_dim)
        biases.append(Output(f"{prefix}.{name}.{letter}_bias", info.dtype, shape))
    return KVCacheScale(scale.module, scale.unit, scale.key, scale.value, *biases)


def _first_linear(module: nn.Module) -> str | None:
    return next((n for n, child in module.named_children() if isinstance(child, nn.Linear)), None)


def _is_skipped(source: str, ptq: PTQSpec) -> bool:
    return any(match_part(p, source.removesuffix(".weight")) for p in ptq.skip_modules)
