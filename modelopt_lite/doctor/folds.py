"""A numeric check of norm feeds: a scale moved from a norm into its readers changes nothing."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from modelopt_lite.doctor.anatomy import Block, child_of, norms_in
from modelopt_lite.doctor.feeds import experts_in, stated_readers
from modelopt_lite.doctor.instance import Instance, rerun
from modelopt_lite.doctor.laws import as_they_lie, stacks_by_name
from modelopt_lite.doctor.norms import adds_one
from modelopt_lite.doctor.subject import Subject, listed

_SAME = 1e-4  # of the largest value; products in float32 round to about 1e-6 of it, a few times


def check_norm_folds(subject: Subject) -> None:
    """Fold a scale into each listed norm and out of its readers; the layer must give the same."""
    for made in subject.each():
        done: set[tuple[type, frozenset[str]]] = set()
        for path, layer in subject.layers(made).items():
            if layer not in made.calls:
                continue
            for norm, readers in stated_readers(subject, made, layer, copied=True).items():
                kind = (type(layer), frozenset({norm, *readers}))
                if norm in norms_in(layer) and kind not in done:
                    done.add(kind)
                    _fold(subject, made, path, layer, norm, sorted(readers))


def _fold(
    subject: Subject, made: Instance, path: str, layer: nn.Module, norm: str, readers: list[str]
) -> None:
    source = layer.get_submodule(norm)
    weight, adds = layer.get_parameter(f"{norm}.weight"), adds_one(made, source)
    views: list[Tensor] = []
    for reader in readers:
        found = _inputs_of(subject, made, layer, reader, weight.numel())
        if not found:
            subject.open(f"ptq_spec.norm_feeds: {path}.{reader} could not be folded into")
            return
        views += found
    if adds is None or not views:
        return
    base = rerun(made, layer)
    scale = 0.5 + torch.rand(weight.numel(), generator=torch.Generator().manual_seed(1))
    owned = [p for p in (weight, getattr(source, "bias", None)) if isinstance(p, Tensor)]
    before = [(v, v.clone()) for v in (*owned, *views)]
    try:
        weight.copy_((weight + 1) * scale - 1 if adds else weight * scale)
        for other in owned[1:]:
            other.mul_(scale)
        only_norm = rerun(made, layer)
        for view in views:
            view.div_(scale)
        both = rerun(made, layer)
    finally:
        for view, old in before:
            view.copy_(old)
    size = base.abs().max()
    if (only_norm - base).abs().max() < 1e-3 * size:
        subject.open(f"ptq_spec.norm_feeds: {path}.{norm} hardly reaches the layer's output")
    elif (both - base).abs().max() > _SAME * size:
        subject.wrong(
            "ptq_spec.norm_feeds",
            f"{path}.{norm}: the layer's output changes when a scale moves from it into "
            f"{listed(readers)}: something else reads it",
            f"name all its readers, or take {norm!r} out",
        )


def _inputs_of(
    subject: Subject, made: Instance, layer: nn.Module, reader: str, width: int
) -> list[Tensor]:
    """Return the weights of a reader as views whose last axis is its input; [] where unknown."""
    if (block := experts_in(subject, made, layer).get(reader)) is not None:
        return _of_experts(subject, made, block, width)
    module = layer.get_submodule(reader)
    weights: list[Tensor] = [p for p in module.parameters() if p.ndim == 2]
    return [weight for weight in weights if weight.shape[-1] == width][:1]


def _of_experts(subject: Subject, made: Instance, block: Block, width: int) -> list[Tensor]:
    """Return gate and up of every expert, the input along the last axis."""
    storage = subject.storage
    if block.experts:
        names = storage.linear_names[:-1]
        linears = [child_of(e, name) for e in block.experts for name in names]
        return [m.weight for m in linears if isinstance(m, nn.Linear)]
    by_name = stacks_by_name(made, block)
    storage = as_they_lie(storage, by_name)
    found = [by_name[name] for name in storage.stacked_names[:-1] if name in by_name]
    views = [stack.mT if storage.input_major else stack for stack in found]
    return views if all(v.shape[-1] == width for v in views) else []
