"""What a plan needs to know of a model: which tensors on disk are what in it.

It comes from the model, built without weights in the installed transformers, or, where the scales
of a recipe follow from weights alone, from the tensors' names and the model's spec
(`modelopt_lite.naming`), so that transformers need not be there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from modelopt_lite.checkpoint.names import NameMap, map_names
from modelopt_lite.models import is_moe
from modelopt_lite.models.specs import ModelSpec, ptq_facts, storage_facts
from modelopt_lite.offload.units import Unit, find_units, output_head, text_model


@dataclass(frozen=True, slots=True)
class TensorShape:
    """Shape and dtype of a tensor on disk."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def is_matrix(self) -> bool:
        """Whether it is a matrix of floating-point numbers, or several."""
        return self.dtype.is_floating_point and len(self.shape) > 1


def is_weight(source: str, info: TensorShape) -> bool:
    """Whether a tensor could be the weight of a linear layer."""
    return info.is_matrix and len(info.shape) == 2 and source.endswith(".weight")


@dataclass(frozen=True, slots=True)
class Structure:
    """Which tensors on disk are what.

    Attributes:
        names: Which entry of the model each fills; where there is no model, itself.
        linear: Weights of linear layers and of single experts.
        heads: Modules on disk that are the output head.
        tied_heads: Those that have no tensor of their own.
        units: How the model is streamed, in the order of its modules.
        stacks: Tensors that hold stacked experts, as far as can be seen without a spec.
        outside: Tensors that text never reaches, as far as can be seen without a spec.
        model: The model; None where the names told all.
    """

    names: NameMap
    linear: frozenset[str]
    heads: frozenset[str]
    tied_heads: frozenset[str]
    units: tuple[Unit, ...]
    stacks: frozenset[str] = frozenset()
    outside: frozenset[str] = frozenset()
    model: nn.Module | None = None


def structure_of(
    model: nn.Module, tensors: Mapping[str, TensorShape], spec: ModelSpec | None
) -> Structure:
    """Read a model's structure off its modules.

    Args:
        model: The model, on the meta device or in memory.
        tensors: What the source holds.
        spec: Gives the classes of decoder layers; without one the modules tell all.

    Raises:
        CheckpointError: The source lacks a tensor that the model needs, or has another shape.
    """
    names = map_names(model, {name: info.shape for name, info in tensors.items()})
    linear, stacks, outside = set(), set(), set()
    text = set(text_model(model).modules())
    modules = dict(model.named_modules(remove_duplicate=False))
    for source, info in tensors.items():
        place = names.place(source)
        if place is None or not info.is_matrix:
            continue
        entry, region = place
        owner = modules[entry.rpartition(".")[0]]
        expert, _ = storage_facts(spec).expert_of(source.removesuffix(".weight"))
        of_expert = expert is not None and bool(region) and isinstance(region[0], int)
        if is_weight(source, info) and (isinstance(owner, nn.Linear) or of_expert):
            linear.add(source)
        elif spec is None and _is_stack(modules, source, info, entry):
            stacks.add(source)
        if spec is None and owner not in text:
            outside.add(source)
    heads, tied = _heads(model, names)
    return Structure(
        names=names,
        linear=frozenset(linear),
        heads=heads,
        tied_heads=tied,
        units=tuple(find_units(model, ptq_facts(spec).layer_names)),
        stacks=frozenset(stacks),
        outside=frozenset(outside),
        model=model,
    )


def _is_stack(modules: Mapping[str, nn.Module], source: str, info: TensorShape, entry: str) -> bool:
    """Whether a tensor of an unknown model that is no linear layer's holds experts."""
    parts = entry.split(".")
    around = [modules[".".join(parts[:end])] for end in range(1, len(parts))]
    if source.endswith("bias") or isinstance(around[-1], nn.Conv1d | nn.Conv2d | nn.Conv3d):
        return False
    in_block = len(info.shape) > 2 and any(is_moe(module) for module in around)
    return in_block or "expert" in source


def _heads(model: Any, names: NameMap) -> tuple[frozenset[str], frozenset[str]]:
    """Names on disk of the output head, wherever the model has one; and of one that is tied."""
    found = output_head(model)
    if found is None:
        return frozenset(), frozenset()
    name, head = found
    group = names.by_target.get(f"{name}.weight")
    sources = {s.removesuffix(".weight") for s in group.sources} if group else {name}
    aliases = (alias.rpartition(".")[0] for alias in names.aliases)
    tied = {alias for alias in aliases if model.get_submodule(alias) is head}
    return frozenset(sources), frozenset(tied)
