"""Checks of class and module names: blocks, routers, shared experts, layers, towers."""

from __future__ import annotations

from torch import nn

from modelopt_lite.checkpoint.names import NameMap
from modelopt_lite.doctor.anatomy import Block, child_of, layer_lists
from modelopt_lite.doctor.instance import Instance
from modelopt_lite.doctor.subject import Subject, listed
from modelopt_lite.offload.patterns import match_part
from modelopt_lite.offload.units import text_model


def check_classes(subject: Subject) -> None:
    """Hold the names of classes and modules to the models."""
    for made in subject.each():
        _blocks(subject, made)
        _layers(subject, made)
    _unused_blocks(subject)
    _routers(subject)
    _shared(subject)
    _unused_globs(subject)


def _blocks(subject: Subject, made: Instance) -> None:
    """Every mixture of experts must be matched, and nothing else."""
    moe, found = subject.spec.moe_spec, subject.blocks[id(made)]
    kinds = {type(block.module).__name__ for block in found}
    if moe is None:
        if found:
            subject.wrong(
                "moe_spec",
                f"None, and {found[0].path} ({listed(kinds)}) holds {found[0].count} experts",
                f"add MoESpec(block_names=({', '.join(map(repr, sorted(kinds)))},), ...)",
            )
        return
    for block in found:
        left = any(match_part(glob, block.path) for glob in subject.ptq.skip_modules)
        if left or not moe.block_names or moe.matches(block.module):
            continue
        if "atten" in block.path.casefold():
            subject.open(f"moe_spec.block_names: not {block.path}, experts of an attention")
        else:
            subject.wrong(
                "moe_spec.block_names",
                f"{moe.block_names} match no class of {block.path}, a "
                f"{type(block.module).__name__} with {block.count} experts",
                f"add {type(block.module).__name__!r}",
            )
    experts = {type(b.module) for blocks in subject.blocks.values() for b in blocks}
    for path, module in made.model.named_modules():
        if not (moe.block_names and moe.matches(module)) or type(module) in experts:
            continue
        if not (moe.expert_linear_names or subject.storage.stacked_names):
            subject.open(f"moe_spec.block_names: the experts of {path} are of an unknown kind")
        else:
            subject.wrong(
                "moe_spec.block_names",
                f"{moe.block_names} match {path}, a {type(module).__name__}, which holds no "
                "experts beside a router",
                f"name the class of the blocks: {listed(kinds)}",
            )


def _unused_blocks(subject: Subject) -> None:
    moe = subject.spec.moe_spec
    described = moe is not None and (moe.expert_linear_names or subject.storage.stacked_names)
    if described and not any(subject.blocks.values()):
        subject.wrong(
            "moe_spec",
            "no model that could be built has a mixture of experts",
            "remove moe_spec, or check it on a model that has one, with --ckpt",
        )


def _routers(subject: Subject) -> None:
    """What chooses experts, and single gates, are matched by the router names, as on disk."""
    if subject.spec.moe_spec is None:
        return
    names, seen = set(subject.ptq.router_names), set()
    for made, block in subject.all_blocks():
        for child in block.routers:
            spellings = {child, *_paths_on_disk(made, f"{block.path}.{child}")}
            under = {n for n in names for s in spellings if f"{s}.".startswith(f"{n}.")}
            under |= {n for n in names if n.startswith(f"{child}.") and child_of(block.module, n)}
            seen |= under
            if not under:
                subject.wrong(
                    "ptq_spec.router_names",
                    f"{subject.ptq.router_names} lack {child!r} of {block.path} "
                    f"({type(block.module).__name__}), which chooses among {block.count} experts",
                    f"add {child!r}",
                )
    for name in sorted(names - seen):
        subject.open(f"ptq_spec.router_names: no block has a {name!r} here")


def _paths_on_disk(made: Instance, path: str) -> set[str]:
    """Return the endings of the paths of the modules on disk that fill a module in memory."""
    names, found = made.names, set()
    for source, (entry, _) in names.places.items() if isinstance(names, NameMap) else ():
        if entry.startswith(f"{path}."):
            parts = source.split(".")
            found |= {".".join(parts[at:-1]) for at in range(1, len(parts) - 1)}
    return found


def _shared(subject: Subject) -> None:
    """What else a block holds that multiplies every token is a shared expert."""
    if subject.spec.moe_spec is None:
        return
    names, seen = set(subject.storage.shared_expert_names), set()
    for _, block in subject.all_blocks():
        seen |= {name for name in names if getattr(block.module, name, None) is not None}
        for name in dense_children(block):
            if name not in names:
                subject.wrong(
                    "expert_storage_spec.shared_expert_names",
                    f"{subject.storage.shared_expert_names} lack {name!r} of {block.path}",
                    f"add {name!r}",
                )
    for name in sorted(names - seen):
        subject.open(f"expert_storage_spec.shared_expert_names: no block has a {name!r} here")


def dense_children(block: Block) -> list[str]:
    """Return the children of a block that are an MLP: with two or three linear layers."""
    if block.container in ("", None) or "layer" in type(block.module).__name__.casefold():
        return []  # experts beside attention, on the decoder layer itself
    first = block.container.split(".", 1)[0]
    return [
        name
        for name, child in block.module.named_children()
        if name not in (first, *block.routers)
        and sum(isinstance(m, nn.Linear) for m in child.modules()) in (2, 3)
    ]


def _layers(subject: Subject, made: Instance) -> None:
    """The classes of decoder layers match the layers of the text model, all of them."""
    spec, names = subject.spec, subject.ptq.layer_names
    if spec.ptq_spec is None:
        return
    inside = set(text_model(made.model).modules()) if made.kind == "causal LM" else None
    lists = {
        path: layers
        for path, layers in layer_lists(made.model).items()
        if (inside is None or layers[0] in inside)
        and not any(match_part(glob, path) for glob in subject.ptq.skip_modules)
    }
    kinds = {type(layer).__name__ for layers in lists.values() for layer in layers}
    if not names:
        subject.wrong("ptq_spec.layer_names", "()", f"give the classes: {listed(kinds)}")
        return
    found = subject.layers(made)
    if not found:
        subject.wrong(
            "ptq_spec.layer_names",
            f"{names} match no module of {type(made.model).__name__}",
            f"name the class of the layers: {listed(kinds)}",
        )
        return
    longest = max((layers for layers in lists.values()), key=len, default=())
    missing = {type(m).__name__ for m in longest if m not in set(found.values())}
    if missing and any(m in set(found.values()) for m in longest):
        subject.wrong(
            "ptq_spec.layer_names",
            f"{names} lack {listed(missing)}, layers of {type(made.model).__name__}",
            f"add {listed(map(repr, missing))}",
        )
    elif missing:
        subject.wrong(
            "ptq_spec.layer_names",
            f"{names} match {listed(found)}, which are no decoder layers",
            f"name the class of the layers: {listed(missing)}",
        )


def _unused_globs(subject: Subject) -> None:
    """Globs that match nothing here may be of tensors that the loader ignores."""
    names = {n for made in subject.instances for n, _ in made.model.named_modules()}
    for glob in subject.ptq.skip_modules:
        if not any(match_part(glob, name) for name in names):
            subject.open(f"ptq_spec.skip_modules: {glob!r} matches no module of the built model")
