"""Decide, tensor by tensor, what is quantized and why the rest is not.

The decision is made on the names on disk. Facts come from the model's spec; a model without one is
judged by its structure (is it a linear layer, does it sit beside a list of experts), and whatever
cannot be known that way is an error or a stated reason, never a guess.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from modelopt_lite.checkpoint.names import Region
from modelopt_lite.errors import ShapeError, SpecError
from modelopt_lite.formats.base import Numerics
from modelopt_lite.formats.linear import FORMATS
from modelopt_lite.models.specs import (
    ExpertStorageSpec,
    ModelSpec,
    PTQSpec,
    ptq_facts,
    storage_facts,
)
from modelopt_lite.offload.patterns import match_part
from modelopt_lite.structure import Structure, TensorShape, is_weight
from modelopt_lite.words import counted


@dataclass(frozen=True, slots=True)
class Candidate:
    """A matrix on disk that could be quantized.

    Attributes:
        name: The module's name, as the export will have it.
        source: The tensor on disk that holds it.
        region: The part of that tensor; ``()`` is all of it.
        shape: [R, K] of the matrix; of stacked experts [E, K, R] where ``input_major``, as on disk.
        input_major: The reduction axis comes before the output axis on disk.
        stacked: It stays one tensor with all experts of the layer.
        expert: Which expert of its layer it belongs to, or None.
        experts: Name of the expert container it belongs to, or None.
        role: Last part of its name ("q_proj"), what fused groups are made of.
        skip: Why it is not quantized; None if it is.
        format: Name of the format that the recipe gives it; empty before, and where it is left.
    """

    name: str
    source: str
    region: Region
    shape: tuple[int, ...]
    input_major: bool = False
    stacked: bool = False
    expert: int | None = None
    experts: str | None = None
    role: str = ""
    skip: str | None = None
    format: str = ""

    @property
    def width(self) -> int:
        """Its inputs, K."""
        return self.shape[-2] if self.stacked and self.input_major else self.shape[-1]


@dataclass(frozen=True, slots=True)
class Output:
    """A tensor of the export."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


def find_candidates(
    structure: Structure, tensors: Mapping[str, TensorShape], spec: ModelSpec | None
) -> list[Candidate]:
    """List every matrix that could be quantized, with the reason where the model's facts forbid it.

    What a spec names as left out is listed whether or not it is a linear layer: whether a router is
    one depends on the release of transformers.

    Raises:
        SpecError: Stacked experts whose orientation no spec gives.
    """
    storage = storage_facts(spec)
    found: list[Candidate] = []
    others: list[Candidate] = []
    for source, info in tensors.items():
        if not info.is_matrix:
            continue
        if source in structure.stacks:
            raise SpecError(
                f"tensor {source!r} {list(info.shape)} holds stacked experts, and no spec says "
                "which axis is the reduction axis; `modelopt-lite specs new CKPT` writes a first "
                "draft of one (docs/add_a_model.md)"
            )
        if source in structure.linear:
            found.append(_single(source, info, storage))
        elif len(info.shape) == 3 and source in structure.names.by_source:
            found += _stacked(source, info, oriented(storage, source, tensors))
        elif spec is not None and is_weight(source, info):
            others.append(_single(source, info, storage))
    return _apply_facts(structure, found, others, spec)


def _single(source: str, info: TensorShape, storage: ExpertStorageSpec) -> Candidate:
    """A 2-D tensor: the weight of a linear layer or of one expert."""
    name = source.removesuffix(".weight")
    role = name.rpartition(".")[2]
    expert, container = storage.expert_of(name)
    return Candidate(name, source, (), info.shape, expert=expert, experts=container, role=role)


def _stacked(source: str, info: TensorShape, storage: ExpertStorageSpec) -> list[Candidate]:
    """A 3-D tensor with the experts of a layer: one candidate, or one for each matrix in it."""
    parent, _, leaf = source.removesuffix(".weight").rpartition(".")
    container = storage.container_above(parent)
    if leaf not in storage.stacked_names or container is None:
        return []
    if storage.export_stacked:
        return [
            Candidate(
                source.removesuffix(".weight"),
                source,
                (),
                info.shape,
                input_major=storage.input_major,
                stacked=True,
                experts=container,
                role=leaf,
            )
        ]
    roles = storage.roles(leaf)
    found = []
    for expert in range(info.shape[0]):
        for position, role in enumerate(roles):
            region, shape = slice_expert(info.shape, expert, position, len(roles), storage)
            found.append(
                Candidate(
                    f"{container}.{expert}.{role}",
                    source,
                    region,
                    shape,
                    input_major=storage.input_major,
                    expert=expert,
                    experts=container,
                    role=role,
                )
            )
    return found


class _Shaped(Protocol):
    @property
    def shape(self) -> tuple[int, ...]: ...


def oriented(
    storage: ExpertStorageSpec, source: str, tensors: Mapping[str, _Shaped]
) -> ExpertStorageSpec:
    """Return the facts of the layer that a stack of the source belongs to."""
    stem = source.removesuffix(".weight")
    parent, dot, _ = stem.rpartition(".")
    suffix = source.removeprefix(stem)
    stacks = [tensors.get(f"{parent}{dot}{name}{suffix}") for name in storage.stacked_names]
    if not stacks or stacks[0] is None or stacks[-1] is None:
        return storage
    return storage.oriented(stacks[0].shape, stacks[-1].shape)


def slice_expert(
    shape: tuple[int, ...], expert: int, position: int, count: int, storage: ExpertStorageSpec
) -> tuple[Region, tuple[int, int]]:
    """Region of one matrix in a stack, and its shape [R, K]."""
    out_axis = 2 if storage.input_major else 1
    size = shape[out_axis] // count
    part: slice = slice(position * size, (position + 1) * size)
    if storage.interleaved_gate_up and count == 2:
        part = slice(position, None, 2)
    if storage.input_major:
        return (expert, slice(None), part), (size, shape[1])
    return (expert, part), (size, shape[2])


def _apply_facts(
    structure: Structure,
    found: list[Candidate],
    others: list[Candidate],
    spec: ModelSpec | None,
) -> list[Candidate]:
    """Set the reasons that the architecture gives: head, routers, towers, single outputs.

    Of ``others``, which are no linear layers, those are kept that the spec gives a reason for.
    """
    ptq = ptq_facts(spec)
    blocks = {c.experts.rpartition(".")[0]: c.experts for c in found if c.experts}
    counts: dict[str, int] = {}
    for c in found:
        if c.experts and c.expert is not None:
            counts[c.experts] = max(counts.get(c.experts, 0), c.expert + 1)
    named = (_with_skip(c, _named_in_spec(c, blocks, ptq)) for c in others)
    return [
        *(_with_skip(c, _fact(c, structure, blocks, counts, ptq)) for c in found),
        *(c for c in named if c.skip),
    ]


def _fact(
    c: Candidate,
    structure: Structure,
    blocks: Mapping[str, str],
    counts: Mapping[str, int],
    ptq: PTQSpec,
) -> str | None:
    if c.name in structure.heads:
        return "output head"
    parent = c.name.rpartition(".")[0]
    if parent in blocks and c.expert is None and c.shape[0] == counts.get(blocks[parent]):
        return "router"
    if reason := _named_in_spec(c, blocks, ptq):
        return reason
    if c.shape[0] == 1 and not c.stacked:
        return "one output only"
    return "outside of the text model" if c.source in structure.outside else None


def _named_in_spec(c: Candidate, blocks: Mapping[str, str], ptq: PTQSpec) -> str | None:
    for router in ptq.router_names:
        block, found, _ = f"{c.name}.".rpartition(f".{router}.")
        if found and block in blocks:
            return "router"
    for pattern in ptq.skip_modules:
        if match_part(pattern, c.name):
            return f"left out by the model's spec ({pattern})"
    return None


def _with_skip(c: Candidate, skip: str | None) -> Candidate:
    return replace(c, skip=skip) if skip else c


def check_shapes(
    candidates: list[Candidate], on_bad_shape: str, numerics: Numerics
) -> list[Candidate]:
    """Leave out the matrices that their formats cannot hold.

    Raises:
        ShapeError: There is one, unless ``on_bad_shape`` is "skip".
    """
    problems: list[str] = []
    checked = []
    for c in candidates:
        problem = None
        if c.skip is None:
            turned = c.stacked and c.input_major
            problem = FORMATS[c.format].problem(
                c.shape, stacked_input_major=turned, numerics=numerics
            )
        if problem:
            problems.append(f"{c.name} {list(c.shape)} in {c.format}: {problem}")
        checked.append(replace(c, skip=f"shape: {problem}") if problem else c)
    if problems and on_bad_shape == "error":
        more = f" (and {len(problems) - 5} more)" if len(problems) > 5 else ""
        raise ShapeError(
            f"{counted(len(problems), 'matrix does', 'matrices do')} not fit the format: "
            f"{'; '.join(problems[:5])}{more}; "
            'use on_bad_shape="skip" (--on-bad-shape skip) to leave them unquantized, exclude them '
            f"in the recipe, or choose another format{_smaller_groups(candidates)}"
        )
    return checked


def _smaller_groups(candidates: Iterable[Candidate]) -> str:
    """Say which groups INT4 formats could have, where other sizes would fit."""
    taken = [c for c in candidates if c.skip is None and FORMATS[c.format].codec.any_block]
    common = math.gcd(*(c.width for c in taken)) if taken else 0
    fitting = [size for size in (128, 64, 32, 16, 8) if common and common % size == 0]
    return f" or group_size: {fitting[0]}" if fitting else ""
