"""Numeric checks of norms that scale by weight + 1, and of folds of activation scales."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from modelopt_lite.doctor.anatomy import child_of, norms_in
from modelopt_lite.doctor.instance import Instance, first_tensor, rerun
from modelopt_lite.doctor.subject import Subject, listed
from modelopt_lite.models import match_class_names

_SAME = 1e-5  # products in float32 round to about 1e-6 of the largest value


def check_norms(subject: Subject) -> None:
    """Hold the names of weight-plus-one norms to what the norms compute."""
    names = subject.export.weight_plus_one_norm_names
    matched = False
    for made in subject.each():
        for path, layer in subject.layers(made).items():
            for name, norm in norms_in(layer).items():
                adds = adds_one(made, norm)
                if adds is None:
                    subject.open(f"weight_plus_one_norm_names: {path}.{name} could not be run")
                    continue
                stated = match_class_names(norm, names)
                matched |= stated
                if stated != adds:
                    kind = type(norm).__name__
                    subject.wrong(
                        "export_spec.weight_plus_one_norm_names",
                        f"{names}; {path}.{name}, a {kind}, scales by weight"
                        f"{' + 1' if adds else ''}",
                        f"add {kind!r}" if adds else f"take out the name that matches {kind}",
                    )
    if names and not matched:
        kinds = {
            type(norm).__name__
            for made in subject.instances
            for layer in subject.layers(made).values()
            for norm in norms_in(layer).values()
        }
        subject.wrong(
            "export_spec.weight_plus_one_norm_names",
            f"{names} match no norm; there are {listed(kinds)}",
            "remove them",
        )


def adds_one(made: Instance, norm: nn.Module) -> bool | None:
    """Whether a norm scales by weight + 1: whether it gives anything with a weight of zeros.

    None where it cannot be run.
    """
    weight, bias = norm.weight, getattr(norm, "bias", None)
    before = [(p, p.clone()) for p in (weight, bias) if isinstance(p, Tensor)]
    for p, _ in before:
        p.zero_()
    try:
        if norm in made.calls:
            out: Tensor | None = rerun(made, norm)
        else:
            out = first_tensor(norm(torch.randn(2, 3, len(weight))))  # type: ignore[arg-type]
    except Exception:  # the model's own code
        return None
    finally:
        for p, old in before:
            p.copy_(old)
    return None if out is None else bool(out.any())


def check_folds(subject: Subject) -> None:
    """Moving a scale from the inputs of one linear to the rows of another changes nothing."""
    for rule in subject.export.pqs_fuse_rules:
        parts, into, source = rule
        field = f"export_spec.pqs_fuse_rules {into} <- {source}"
        for part in parts:
            named = [
                (made, path, m)
                for made in subject.instances
                for path, m in made.model.named_modules()
                if part in type(m).__name__
            ]
            pairs = [(made, path, m) for made, path, m in named if _linears(m, into, source)]
            if named and not pairs:
                made, path, module = named[0]
                subject.wrong(
                    field,
                    f"{path}, a {type(module).__name__}, has no linears {into} and {source}",
                    f"its children are {listed(n for n, _ in module.named_children())}",
                )
            elif not named and not _class_exists(subject, part):
                subject.wrong(field, f"no class is called {part}", "correct the name")
            elif not any(m in made.calls for made, _, m in pairs):
                subject.open(f"{field}: no {part} runs in the built models")
            for made, path, module in pairs:
                if module in made.calls and not _folds(made, module, into, source):
                    subject.wrong(
                        field,
                        f"the output of {path} changes when a scale moves from the inputs of "
                        f"{source} to the rows of {into}",
                        "remove the rule",
                    )


def _class_exists(subject: Subject, part: str) -> bool:
    import importlib

    modules = {type(made.model).__module__ for made in subject.instances}
    return any(
        part in name and isinstance(member, type)
        for module in modules
        for name, member in vars(importlib.import_module(module)).items()
    )


def _linears(module: nn.Module, *names: str) -> bool:
    return all(isinstance(child_of(module, name), nn.Linear) for name in names)


def _folds(made: Instance, module: nn.Module, into: str, source: str) -> bool:
    """Scale rows of one linear and, inversely, columns of the other; the output must stay."""
    writer, reader = child_of(module, into), child_of(module, source)
    rows, columns = writer.out_features, reader.in_features
    if columns % rows:
        return False
    scale = 0.5 + torch.rand(rows, generator=torch.Generator().manual_seed(0))
    head = int(getattr(module, "head_dim", 1) or 1) if columns > rows else 1
    # With grouped queries several heads of the reader share one of the writer.
    spread = scale.reshape(-1, head).repeat_interleave(columns // rows, 0).reshape(-1)
    base = rerun(made, module)
    kept = [p.clone() for p in (writer.weight, reader.weight)]
    bias = None if writer.bias is None else writer.bias.clone()
    try:
        writer.weight.mul_(scale[:, None])
        if bias is not None:
            writer.bias.mul_(scale)
        only_one = rerun(made, module)
        reader.weight.div_(spread)
        both = rerun(made, module)
    finally:
        writer.weight.copy_(kept[0])
        reader.weight.copy_(kept[1])
        if bias is not None:
            writer.bias.copy_(bias)
    size = base.abs().max()
    moved = (only_one - base).abs().max() > 1e-3 * size  # the probe reaches the output at all
    return bool(moved and (both - base).abs().max() < _SAME * size.clamp(min=1))
