"""Which matrices read the same tensor, and where a scale of that tensor is folded.

An algorithm that scales the channels of what matrices read gives all readers of a tensor one scale.
It is folded where that leaves the model the same: into the norm that makes the tensor, if all that
reads it is known; or into the rows of the linear before. Elsewhere the export keeps it as
``pre_quant_scale``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Literal

from torch import nn

from modelopt_lite.checkpoint.names import NameMap
from modelopt_lite.formats.base import Numerics
from modelopt_lite.models.specs import (
    ExpertStorageSpec,
    ExportSpec,
    ModelSpec,
    PTQSpec,
    match_class_names,
    ptq_facts,
)
from modelopt_lite.recipes import Recipe
from modelopt_lite.select import Candidate
from modelopt_lite.structure import Structure, TensorShape


@dataclass(frozen=True, slots=True)
class Fold:
    """A tensor that takes up a scale.

    Attributes:
        tensor: Its name on disk.
        group: What reads the scaled tensor; see ``Readers.group``.
        kind: How: multiplied by the scale; so, where 1 is added to it when it is used; or divided
            by it, column by column.
    """

    tensor: str
    group: str
    kind: Literal["multiply", "multiply_plus_one", "divide"]


@dataclass(slots=True)
class Readers:
    """What reads what.

    Attributes:
        group: Matrix -> the tensor that it reads, in whatever words.
        kept: Matrices whose scale stays in the export.
        folds: Tensors that are no matrices of the plan, and take up a scale.
        rows: Matrix -> the matrix whose scale multiplies its rows.
        notes: What a user should know of the scales.
    """

    group: dict[str, str] = field(default_factory=dict)
    kept: set[str] = field(default_factory=set)
    folds: list[Fold] = field(default_factory=list)
    rows: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def fused_group(name: str, role: str, ptq: PTQSpec) -> str | None:
    """Return a key that the siblings share which engines fuse with this linear, or None."""
    for group in ptq.fused_linears:
        if role in group:
            return sys.intern(f"{name.removesuffix(role)}[{'+'.join(group)}]")  # one for all of it
    return None


def one_choice(c: Candidate, ptq: PTQSpec) -> str:
    """Return a key that all matrices share which engines want in one format: experts, and fused."""
    return c.experts or fused_group(c.name, c.role, ptq) or c.name


def input_group(c: Candidate, fused: str | None) -> str:
    """All experts of a layer share the scale of what they read: engines keep one for all."""
    if c.experts and not c.stacked:
        return sys.intern(
            f"{c.experts}[{fused.rpartition('[')[2].rstrip(']') if fused else c.role}]"
        )
    return fused or c.name


def find_readers(
    candidates: Iterable[Candidate],
    structure: Structure,
    tensors: Mapping[str, TensorShape],
    spec: ModelSpec | None,
    recipe: Recipe,
    numerics: Numerics,
) -> Readers:
    """Find which matrices share a scale, and where it goes.

    Scales go into norms, and into the linear before where the spec allows it; those of SVDQuant
    stay beside their matrices.

    Args:
        candidates: All matrices; those with a ``skip`` are not scaled.
        structure: What they are in the model.
        tensors: What the source holds.
        spec: The model's facts.
        recipe: Its algorithm says whether there are scales at all.
        numerics: ``modelopt`` folds scales of AWQ alone, into linears those of NVFP4, and nothing
            that experts read.
    """
    ptq, taken = ptq_facts(spec), [c for c in candidates if c.skip is None]
    readers = Readers()
    for c in taken:
        readers.group[c.name] = input_group(c, fused_group(c.name, c.role, ptq))
    if not recipe.algorithm.smooths:
        return readers
    model, names = structure.model, structure.names
    assert model is not None, "scales that inputs determine need a model"
    readers.kept = {c.name for c in taken}
    method = recipe.algorithm.method
    export = (spec.export_spec if spec else None) or ExportSpec()
    if not export.grouped_expert_export and any(c.experts for c in taken):
        readers.notes.append(
            f"{method} gives all experts of a layer one scale of what they read, and no "
            "spec says that such a grouping was validated for this model: compare predictions by "
            "`modelopt-lite verify OUT --source CKPT --deep --text FILE`"
        )
    folds = numerics == "exact" or method.startswith("awq")
    folds = folds and method != "svdquant"  # factors belong to the inputs that they were found for
    folds_rows = folds and (numerics == "exact" or recipe.format == "nvfp4")
    if folds_rows:
        _fold_rows(readers, taken, model, names, tensors, export)
    if folds:
        storage = (spec.expert_storage_spec if spec else None) or ExpertStorageSpec()
        folding = _NormFolding(readers, taken, tensors, storage, numerics)
        plus_one = _plus_one(model, names, export.weight_plus_one_norm_names)
        for norm, paths in ptq.norm_feeds:
            for prefix in folding.layers(paths):
                folding.fold(prefix, norm, paths, plus_one)
    return readers


def _fold_rows(
    readers: Readers,
    taken: Sequence[Candidate],
    model: nn.Module,
    names: NameMap,
    tensors: Mapping[str, TensorShape],
    export: ExportSpec,
) -> None:
    """Fold scales of one linear into the rows of the one before; see ``pqs_fuse_rules``."""
    by_name = {c.name: c for c in taken}
    for c in taken:
        for parts, into, origin in export.pqs_fuse_rules:
            other = by_name.get(f"{c.name.removesuffix(origin)}{into}")
            if c.role != origin or other is None or other.shape[0] != c.shape[-1] or c.stacked:
                continue
            # Fused experts have no class of their own: their names say that the rule is meant.
            if c.expert is None and not _class_has(model, names, c.source, parts):
                continue
            readers.group[c.name] = c.name
            readers.rows[other.name] = c.name
            readers.kept.discard(c.name)
            if f"{other.name}.bias" in tensors:
                readers.folds.append(Fold(f"{other.name}.bias", c.name, "multiply"))


def _class_has(model: nn.Module, names: NameMap, source: str, parts: tuple[str, ...]) -> bool:
    place = names.place(source)
    if place is None:
        return False
    owner = model.get_submodule(place[0].rpartition(".")[0].rpartition(".")[0])
    return any(part in type(owner).__name__ for part in parts)


class _NormFolding:
    """Folds the scales of what a norm feeds into it, layer by layer."""

    def __init__(
        self,
        readers: Readers,
        taken: Sequence[Candidate],
        tensors: Mapping[str, TensorShape],
        storage: ExpertStorageSpec,
        numerics: Numerics,
    ) -> None:
        self._readers = readers
        self._tensors = tensors
        self._numerics = numerics
        self._last = {*storage.linear_names[-1:], *storage.stacked_names[-1:]}
        self._by_name = {c.name: c for c in taken}
        self._experts: dict[str, list[Candidate]] = {}
        for c in taken:
            if c.experts and c.role not in self._last:
                self._experts.setdefault(c.experts, []).append(c)
        self._inside: dict[str, list[str]] = {}
        self._holding: set[str] = set()  # paths with a matrix below that may read what a norm made
        for name in tensors:
            prefixes = list(accumulate(name.split(".")[:-1], "{}.{}".format))
            if not self._is_no_reader(name):
                self._holding.update(prefixes)
            for container in self._experts.keys() & set(prefixes):
                self._inside.setdefault(container, []).append(name)

    def layers(self, paths: Sequence[str]) -> list[str]:
        """Return the prefixes of names before these paths."""
        found = dict.fromkeys(
            name.removesuffix(path)
            for name in (*self._by_name, *self._experts)
            for path in paths
            if name.endswith(f".{path}")
        )
        return list(found)

    def fold(
        self, prefix: str, norm: str, paths: Sequence[str], plus_one: Callable[[str], bool]
    ) -> None:
        """Fold into a layer's norm where every reader can be scaled."""
        weight = f"{prefix}{norm}.weight"
        if weight not in self._tensors:
            return
        width = self._tensors[weight].shape[0]
        members: list[Candidate] = []
        others: list[str] = []
        for path in paths:
            found = self._readers_at(f"{prefix}{path}", width)
            if found is None:
                return
            members += found[0]
            others += found[1]
        has_experts = any(c.experts for c in members)
        if not members or (self._numerics == "modelopt" and (others or has_experts)):
            return
        for c in members:
            self._readers.group[c.name] = weight
            self._readers.kept.discard(c.name)
        scaled = Fold(weight, weight, "multiply_plus_one" if plus_one(weight) else "multiply")
        self._readers.folds.append(scaled)
        if (bias := f"{prefix}{norm}.bias") in self._tensors:
            self._readers.folds.append(Fold(bias, weight, "multiply"))
        self._readers.folds += [Fold(name, weight, "divide") for name in others]

    def _readers_at(self, path: str, width: int) -> tuple[list[Candidate], list[str]] | None:
        """Return matrices to scale and tensors to divide at a path; None where that cannot be."""
        if path in self._by_name:
            c = self._by_name[path]
            return ([c], []) if c.shape[-1] == width else ([], [])
        if path in self._experts:
            members = self._experts[path]
            if any(c.width != width for c in members):
                return [], []
            known = {c.source for c in members}
            left = [name for name in self._inside[path] if name not in known]
            return (members, []) if all(map(self._is_no_reader, left)) else None
        tensor = self._tensors.get(f"{path}.weight")
        if tensor is not None and len(tensor.shape) == 2 and tensor.shape[1] == width:
            return [], [f"{path}.weight"]
        return ([], []) if tensor is not None or path not in self._holding else None

    def _is_no_reader(self, name: str) -> bool:
        role = name.removesuffix(".weight").rpartition(".")[2]
        return role in self._last or role.endswith("bias") or len(self._tensors[name].shape) < 2


def _plus_one(model: nn.Module, names: NameMap, classes: tuple[str, ...]) -> Callable[[str], bool]:
    def scales_by_weight_plus_one(tensor: str) -> bool:
        place = names.place(tensor)
        owner = model.get_submodule(place[0].rpartition(".")[0]) if place else None
        return match_class_names(owner, classes)

    return scales_by_weight_plus_one
