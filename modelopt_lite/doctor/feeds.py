"""Checks of who reads what: linears that share an input, norms and their readers, keys and values.

A module reads a tensor where its input lies at the tensor's address in a forward pass during which
nothing was freed.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from modelopt_lite.doctor.anatomy import Block, child_of, norms_in
from modelopt_lite.doctor.instance import Instance
from modelopt_lite.doctor.subject import Subject, listed
from modelopt_lite.models.specs import STRUCTURAL_PTQ

Feeds = dict[str, frozenset[str]]


def check_feeds(subject: Subject) -> None:
    """Hold groups of linears, readers of norms, and key and value names to a forward pass."""
    if subject.spec.ptq_spec is None:
        return
    for made in subject.instances:
        if made.not_run:
            subject.open(f"norm_feeds and fused_linears: no forward pass ({made.not_run})")
    ran = [made for made in subject.instances if not made.not_run]
    _groups(subject, ran)
    _norms(subject, ran)
    _keys_and_values(subject, ran)


def siblings(root: nn.Module, group: tuple[str, ...]) -> list[tuple[str, list[Any]]]:
    """Return (path, linears) of every module that has all members of a group as children."""
    found: list[tuple[str, list[Any]]] = [
        (path, [getattr(module, name, None) for name in group])
        for path, module in root.named_modules()
    ]
    return [(path, ms) for path, ms in found if all(isinstance(m, nn.Linear) for m in ms)]


def _groups(subject: Subject, ran: list[Instance]) -> None:
    moe, groups = subject.spec.moe_spec, subject.ptq.fused_linears
    pair = moe.gate_up_pair if moe is not None else None
    for group in groups:
        found = False
        for made in subject.each():
            if made not in ran:
                continue
            for path, linears in siblings(made.model, group):
                found = True
                places = {made.inputs[m].data_ptr() for m in linears if m in made.inputs}
                if len(places) > 1 or len({m.in_features for m in linears}) > 1:
                    subject.wrong(
                        "ptq_spec.fused_linears",
                        f"{group} in {path} read different inputs",
                        "take out the one that reads another input: they cannot share a scale",
                    )
        if not found and ran and group != pair:
            subject.open(f"ptq_spec.fused_linears: no module has all of {group} here")
    if pair is not None and pair not in groups:
        subject.wrong(
            "ptq_spec.fused_linears",
            f"{groups} lack the experts' {pair}, which engines join",
            f"add {pair}",
        )
    for made in subject.each():
        layers = subject.layers(made).values()
        for group in STRUCTURAL_PTQ.fused_linears:
            if group not in groups and any(siblings(layer, group) for layer in layers):
                subject.wrong(
                    "ptq_spec.fused_linears",
                    f"{groups} lack {group}, which layers have and engines join",
                    f"add {group}",
                )


def readers_of_norms(subject: Subject, made: Instance, layer: nn.Module) -> Feeds:
    """Return which linears, routers and experts of a layer read each norm's very output.

    Readers whose input is not as wide as the norm are left out: they read several heads at once.
    """
    norms = norms_in(layer)
    chosen = _routers_and_experts(subject, made)
    whole = tuple(f"{name}." for name, m in layer.named_modules() if m in chosen)
    places = {made.outputs[m].data_ptr(): n for n, m in norms.items() if m in made.outputs}
    seen: dict[str, set[str]] = {}
    for name, module in layer.named_modules():
        wanted = isinstance(module, nn.Linear) or module in chosen
        if not wanted or module not in made.inputs or name in norms or name.startswith(whole):
            continue
        given = made.inputs[module]
        norm = places.get(given.data_ptr())
        if norm is not None and given.shape[-1] == layer.get_parameter(f"{norm}.weight").numel():
            seen.setdefault(norm, set()).add(name)
    return {norm: frozenset(names) for norm, names in seen.items()}


def _routers_and_experts(subject: Subject, made: Instance) -> set[nn.Module]:
    found: set[nn.Module] = set()
    for block in subject.blocks[id(made)]:
        found |= {getattr(block.module, name) for name in block.routers}
        if block.container and not block.experts:
            found.add(child_of(block.module, block.container))
    return found


def experts_in(subject: Subject, made: Instance, layer: nn.Module) -> dict[str, Block]:
    """Return the blocks of a layer by the paths of their experts, as in memory and as on disk."""
    inside = {m: n for n, m in layer.named_modules()}
    found: dict[str, Block] = {}
    for block in subject.blocks[id(made)]:
        if (at := inside.get(block.module)) is not None:
            for container in (subject.storage.container, block.container):
                found[f"{at}.{container}".strip(".")] = block
    return found


def stated_readers(
    subject: Subject, made: Instance, layer: nn.Module, *, copied: bool = False
) -> Feeds:
    """Apply ``norm_feeds`` to a layer: readers that it has, of the norm's width.

    Experts in a list, or in no module of their own, read gathered copies, which no address tells:
    they are left out but for ``copied``.
    """
    stated: dict[str, set[str]] = {}
    experts = experts_in(subject, made, layer)
    for norm, readers in subject.ptq.norm_feeds:
        source = child_of(layer, norm)
        for reader in readers:
            module = child_of(layer, reader)
            if source is None or not (isinstance(module, nn.Module) or reader in experts):
                continue
            if (module is None or isinstance(module, nn.ModuleList)) and not copied:
                continue
            if _width(subject, made, module) in (None, len(source.weight)):
                stated.setdefault(norm, set()).add(reader)
    return {norm: frozenset(names) for norm, names in stated.items()}


def _width(subject: Subject, made: Instance, module: nn.Module | None) -> int | None:
    if isinstance(module, nn.Linear):
        return module.in_features
    return made.inputs[module].shape[-1] if module in made.inputs else None


def _norms(subject: Subject, ran: list[Instance]) -> None:
    """The readers of each norm that is listed are all that read it; others may stay unlisted."""
    unseen = {norm for norm, _ in subject.ptq.norm_feeds}
    listed_norms = set(unseen)
    for made in subject.each():
        if made not in ran:
            continue
        for path, layer in subject.layers(made).items():
            if layer not in made.inputs:
                continue
            seen, stated = (
                readers_of_norms(subject, made, layer),
                stated_readers(subject, made, layer),
            )
            unseen -= set(stated) & set(norms_in(layer))
            for norm in listed_norms & set(norms_in(layer)):
                have, said = seen.get(norm, frozenset()), stated.get(norm, frozenset())
                # A router may be named by the linear layer inside of it.
                missing = {n for n in have - said if not any(s.startswith(f"{n}.") for s in said)}
                extra = {n for n in said - have if child_of(layer, n) in made.inputs}
                extra -= {n for n in extra for r in have if n.startswith(f"{r}.")}
                extra -= _copies(subject, made, layer)
                if missing or extra:
                    _report(subject, f"{path}.{norm}", norm, missing, extra, have)
    for norm in sorted(unseen) if ran else ():
        subject.open(f"ptq_spec.norm_feeds: no layer has a norm {norm!r} that is read here")


def _copies(subject: Subject, made: Instance, layer: nn.Module) -> set[str]:
    """Paths of experts: some models give them copies of what the norm put out."""
    inside = {m: n for n, m in layer.named_modules()}
    return {
        f"{inside[b.module]}.{b.container}".lstrip(".")
        for b in subject.blocks[id(made)]
        if b.module in inside
    }


def _report(subject: Subject, where: str, norm: str, missing: Any, extra: Any, have: Any) -> None:
    less = f"lacks {listed(missing)}" if missing else ""
    more = f"names {listed(extra)}, which do not read it" if extra else ""
    subject.wrong(
        "ptq_spec.norm_feeds",
        f"of {where}: {' and '.join(filter(None, (less, more)))}",
        f"write ({norm!r}, {tuple(sorted(have))})",
    )


def _keys_and_values(subject: Subject, ran: list[Instance]) -> None:
    """Attention that has keys and values of its own has them under the stated names."""
    key, value = subject.ptq.key_value_names
    attentions = [
        (path, module)
        for made in ran
        for path, module in made.model.named_modules()
        if module in made.inputs
        and "attention" in type(module).__name__.casefold()
        and any(path.startswith(f"{layer}.") for layer in subject.layers(made))
    ]
    bare = []
    for path, module in attentions:
        names = {n for n, m in module.named_children() if isinstance(m, nn.Linear)}
        if {key, value} <= names:
            return
        latent = any(n.startswith("kv") for n in names)
        if len(names) > 1 and not latent:
            bare.append((path, names))
    if bare:
        path, names = bare[0]
        subject.wrong(
            "ptq_spec.key_value_names",
            f"{subject.ptq.key_value_names}, and {path} has {listed(names)}",
            "name the children that make keys and values",
        )
