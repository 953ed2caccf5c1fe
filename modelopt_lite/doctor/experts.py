"""Checks of how experts are built: names, layout, and which matrix is which."""

from __future__ import annotations

import dataclasses
import itertools

from torch import nn

from modelopt_lite.checkpoint.names import NameMap
from modelopt_lite.doctor.anatomy import Block, child_of
from modelopt_lite.doctor.instance import Instance
from modelopt_lite.doctor.laws import (
    Matrices,
    Verdict,
    judge,
    single,
    single_on_disk,
    stacked,
    stacks_by_name,
)
from modelopt_lite.doctor.subject import Subject, listed
from modelopt_lite.models.specs import ExpertStorageSpec


def check_layout(subject: Subject) -> None:
    """Hold the expert names to the container of each block."""
    moe = subject.spec.moe_spec
    if moe is None:
        return
    for made, block in subject.all_blocks():
        _container(subject, block)
        _names(subject, made, block)
    _pair(subject)


def _container(subject: Subject, block: Block) -> None:
    container = subject.storage.container
    if container != block.container and child_of(block.module, container) is not None:
        subject.open(f"expert_storage_spec.container: {block.container!r} in memory")
    elif container != block.container:
        subject.open(
            f"expert_storage_spec.container: {container!r} on disk, {block.container!r} in memory"
        )


def _names(subject: Subject, made: Instance, block: Block) -> None:
    moe, storage = subject.spec.moe_spec, subject.storage
    assert moe is not None
    fused = not block.experts
    for form in (True, False):
        given = moe.expert_linear_names_for(block.module, fused=form)
        if given is not None and form != moe.fused_expert_names:
            subject.wrong(
                "moe_spec.fused_expert_names",
                f"{moe.fused_expert_names}, and names are given for the other form",
                "let expert_linear_names_for decline",
            )
    if fused:
        there = {n for n, p in block.stacks.items() if not n.endswith("bias")}
        names = set(moe.expert_linear_names or ())
        if moe.fused_expert_names and not names <= set(stacks_by_name(made, block)):
            subject.wrong(
                "moe_spec.expert_linear_names",
                f"{moe.expert_linear_names}, said to be of the fused container "
                f"{block.path}.{block.container}, which has {listed(there)}",
                f"write {listed(map(repr, there))}",
            )
        both = stacks_by_name(made, block)
        if storage.stacked_names and not set(storage.stacked_names) <= set(both):
            subject.wrong(
                "expert_storage_spec.stacked_names",
                f"{storage.stacked_names}, and {block.path}.{block.container} has {listed(both)}",
                f"write {listed(map(repr, both))}",
            )
        return
    there = {n for n, m in block.experts[0].named_modules() if isinstance(m, nn.Linear)}
    names = set(storage.linear_names if moe.fused_expert_names else moe.expert_linear_names or ())
    if names and names != there:
        field = (
            "expert_storage_spec.linear_names"
            if moe.fused_expert_names
            else "moe_spec.expert_linear_names"
        )
        subject.wrong(
            field,
            f"{sorted(names)}, and an expert of {block.path} has {listed(there)}",
            f"write {listed(map(repr, there))}",
        )


def _pair(subject: Subject) -> None:
    """The pair, the names and the order of the storage section must say the same."""
    moe, storage = subject.spec.moe_spec, subject.storage
    assert moe is not None
    if moe.gate_up_pair and storage.linear_names and storage.linear_names[:2] != moe.gate_up_pair:
        subject.wrong(
            "expert_storage_spec.linear_names",
            f"{storage.linear_names}, and gate_up_pair is {moe.gate_up_pair}",
            "write gate, up, down in this order in both",
        )
    names = storage.stacked_names if moe.fused_expert_names else storage.linear_names
    if moe.expert_linear_names and set(moe.expert_linear_names) != set(names):
        subject.wrong(
            "moe_spec.expert_linear_names",
            f"{moe.expert_linear_names}, and expert_storage_spec has {names}",
            "let the sections agree",
        )


def check_arithmetic(subject: Subject) -> None:
    """Hold gate, up, down and their orientation to the block's own forward pass."""
    if subject.spec.moe_spec is None:
        return
    proven = False
    for made, block in subject.all_blocks():
        if block.module in made.calls:
            proven |= _single(subject, made, block)
            proven |= _stacked(subject, made, block)
    if not proven:
        subject.open("gate, up and down: no block could be run with matrices that the spec names")


def _single(subject: Subject, made: Instance, block: Block) -> bool:
    """Hold the names of single experts, in memory or on disk, to the forward pass."""

    def read(order: tuple[str, ...]) -> Matrices:
        storage = dataclasses.replace(subject.storage, linear_names=order)
        if block.experts:
            return single(block, order)
        names = made.names
        return single_on_disk(made, block, names, storage) if isinstance(names, NameMap) else []

    order = subject.storage.linear_names
    if not order or not (matrices := read(order)):
        return False
    verdict = judge(made, block, matrices)
    if verdict == "capped":
        subject.open(f"gate and up of {block.path}: the output is affine in neither")
    if verdict in ("holds", "capped"):
        return True
    right = [o for o in itertools.permutations(order) if judge(made, block, read(o)) == "holds"]
    pair = verdict == "swapped" and subject.spec.moe_spec is not None
    subject.wrong(
        "moe_spec.gate_up_pair" if pair else "expert_storage_spec.linear_names",
        f"{order}: {_REASONS[verdict]} in {block.path}",
        f"the forward pass has {right[0]}: write them in this order, and gate_up_pair="
        f"{right[0][:2] if len(right[0]) == 3 else None}"
        if right
        else "name gate, up and down as the block uses them",
    )
    return True


def _stacked(subject: Subject, made: Instance, block: Block) -> bool:
    """Hold the names, halves and orientation of stacked experts to the forward pass."""
    storage = subject.storage
    if not storage.stacked_names or not (matrices := stacked(made, block, storage)):
        return False
    verdict = judge(made, block, matrices)
    if verdict == "capped":
        subject.open(f"gate and up of {block.path}: the output is affine in neither half")
    if verdict in ("holds", "capped"):
        return True
    for other in _alternatives(storage):
        if (found := stacked(made, block, other)) and judge(made, block, found) == "holds":
            for field in ("stacked_names", "input_major", "interleaved_gate_up"):
                if (right := getattr(other, field)) != (given := getattr(storage, field)):
                    subject.wrong(
                        f"expert_storage_spec.{field}",
                        f"{given}: {_REASONS[verdict]} in {block.path}",
                        f"write {field}={right}",
                    )
            return True
    there = stacks_by_name(made, block)
    shapes = {name: list(there[name].shape) for name in storage.stacked_names}
    subject.wrong(
        "expert_storage_spec.stacked_names",
        f"{storage.stacked_names} with input_major={storage.input_major}, interleaved_gate_up="
        f"{storage.interleaved_gate_up}: {_REASONS[verdict]} in {block.path} {shapes}",
        "no order of these names and no orientation agrees with the forward pass: look at it",
    )
    return True


def _alternatives(storage: ExpertStorageSpec) -> list[ExpertStorageSpec]:
    """Every other way to read the same stacks; those that differ least come first."""
    return sorted(
        (
            dataclasses.replace(
                storage, stacked_names=names, input_major=major, interleaved_gate_up=interleaved
            )
            for names in itertools.permutations(storage.stacked_names)
            for major in (False, True)
            for interleaved in (False, True)
        ),
        key=lambda other: (
            (other.stacked_names != storage.stacked_names)
            + (other.input_major != storage.input_major)
            + (other.interleaved_gate_up != storage.interleaved_gate_up)
        ),
    )


_REASONS: dict[Verdict, str] = {
    "unpaired": "the last matrix does not read what the first gives",
    "swapped": "the output is proportional to what is said to be the gate, and bends with up",
    "holds": "",
    "capped": "",
}
