"""Checks of names on disk: every tensor that transformers saves is reached by one rule."""

from __future__ import annotations

from typing import Any

from torch import nn

from modelopt_lite.checkpoint.names import NameMap
from modelopt_lite.doctor.instance import Instance
from modelopt_lite.doctor.subject import Subject, listed
from modelopt_lite.errors import CheckpointError
from modelopt_lite.models.specs import NamingSpec
from modelopt_lite.naming import UnclearNamesError, UnlikeLayersError, structure_from_names
from modelopt_lite.offload.patterns import match_part
from modelopt_lite.offload.units import output_head
from modelopt_lite.structure import Structure, TensorShape, is_weight, structure_of


def check_names(subject: Subject) -> None:
    """Hold the names on disk to what transformers saves."""
    used: set[str] = set()
    for made in subject.each():
        (tensors, config), names = made.saved, made.names
        if isinstance(names, CheckpointError):
            subject.open(f"names on disk: {names}")
            continue
        if names.unmapped:
            subject.open(f"names on disk: the model does not take {listed(names.unmapped)}")
        _outside(subject, made)
        _experts(subject, made, tensors)
        _routers_alone(subject, made)
        used |= _roles(subject, made)
        if subject.spec.naming_spec is not None and made.kind == "causal LM":
            _by_names(subject, made, tensors, config)
    naming = subject.spec.naming_spec
    if naming is not None and (extra := set(naming.layer_linear_names) - used):
        subject.open(f"naming_spec.layer_linear_names: nothing is called {listed(extra)} here")


def _owner(model: nn.Module, entry: str) -> nn.Module:
    return model.get_submodule(entry.rpartition(".")[0])


def outside_layers(subject: Subject, made: Instance) -> set[str]:
    """Return the modules on disk with matrices that are in no decoder layer, nor head, nor tokens.

    What a glob of the spec leaves out already is not among them.
    """
    names = made.names
    layers = set(subject.layers(made).values())
    if isinstance(names, CheckpointError) or not layers:
        return set()
    inside = {m for layer in layers for m in layer.modules()}
    naming = subject.spec.naming_spec or NamingSpec()
    head = output_head(made.model)
    bare: set[str] = set()
    for source, info in made.saved[0].items():
        place = names.place(source)
        if place is None or not info.is_matrix:
            continue
        owner, name = _owner(made.model, place[0]), source.removesuffix(".weight")
        if owner in inside or (head is not None and owner is head[1]):
            continue
        known = name in naming.embedding_names or name in naming.head_names
        tokens = isinstance(owner, nn.Embedding)
        if (
            not known
            and not tokens
            and not any(match_part(g, name) for g in subject.ptq.skip_modules)
        ):
            bare.add(name)
    return bare


def _outside(subject: Subject, made: Instance) -> None:
    """Linear and convolution layers outside of decoder layers are left out by a glob."""
    if subject.spec.ptq_spec is not None and (bare := outside_layers(subject, made)):
        subject.wrong(
            "ptq_spec.skip_modules",
            f"{subject.ptq.skip_modules} leave {listed(bare)}, outside of the decoder layers",
            f"add globs for {listed(repr(f'*{tower_of(name)}*') for name in bare)}",
        )


def tower_of(path: str) -> str:
    """Return the part of a path that names a tower: the first that is no wrapper and no number."""
    parts = [p for p in path.split(".") if p not in ("model", "base_model") and not p.isdigit()]
    return parts[0] if parts else path


def _experts(subject: Subject, made: Instance, tensors: dict[str, TensorShape]) -> None:
    """Experts lie on disk one by one under the linear names, or stacked under the stacked ones."""
    blocks, storage = subject.matched_blocks(made), subject.storage
    if not blocks:
        return
    modules = [name.removesuffix(".weight") for name in tensors]
    modules = [m for m in modules if not _left_out(subject, m)]  # towers may have experts, too
    single = {m.rpartition(".")[2] for m in modules if storage.expert_of(m)[1] is not None}
    stacked = set()
    for name, info in tensors.items():
        parent, _, leaf = name.removesuffix(".weight").rpartition(".")
        known = leaf in storage.stacked_names and storage.container_above(parent) is not None
        if len(info.shape) in (2, 3) and known:
            stacked.add(leaf)
    if single and single != set(storage.linear_names):
        subject.wrong(
            "expert_storage_spec.linear_names",
            f"{storage.linear_names}, and single experts on disk have {listed(single)}",
            f"name gate, up and down among {listed(single)}",
        )
    names = storage.linear_names or storage.stacked_names
    if names and not single and not stacked:
        three = {n for n, info in tensors.items() if len(info.shape) == 3}
        subject.wrong(
            "expert_storage_spec",
            f"no tensor on disk is {storage.container}.0.{'/'.join(storage.linear_names) or '-'} "
            f"nor {storage.container}.{'/'.join(storage.stacked_names) or '-'}; of three axes are "
            f"{listed(three)}",
            "correct container, linear_names, stacked_names or stacked_parent",
        )


def _routers_alone(subject: Subject, made: Instance) -> None:
    """The names of routers leave out nothing else of a block."""
    names = made.names
    assert isinstance(names, NameMap)
    owners = {s: _owner(made.model, entry) for s, (entry, _) in names.places.items()}
    for block in subject.matched_blocks(made):
        routers = {m for r in block.routers for m in getattr(block.module, r).modules()}
        inside = set(block.module.modules()) - routers
        for router in subject.ptq.router_names:
            hidden = [s for s, m in owners.items() if m in inside and f".{router}." in f".{s}."]
            if hidden := [s for s in hidden if made.saved[0][s].is_matrix]:
                subject.wrong(
                    "ptq_spec.router_names",
                    f"{router!r} is in the names of {listed(hidden)} too, which choose no experts",
                    f"take {router!r} out, or give the router's own path in its block",
                )


def roles_in_layers(subject: Subject, made: Instance) -> set[str]:
    """Return the last parts of names on disk of the matrices in decoder layers, routers not."""
    names, found = made.names, set()
    if isinstance(names, CheckpointError):
        return set()
    inside = {m for layer in subject.layers(made).values() for m in layer.modules()}
    for source, info in made.saved[0].items():
        place = names.place(source)
        if place is None or not is_weight(source, info):
            continue
        owner, name = _owner(made.model, place[0]), source.removesuffix(".weight")
        expert = subject.storage.expert_of(name)[1] is not None
        linear = isinstance(owner, nn.Linear) or expert
        if owner in inside and linear and not _left_out(subject, name):
            found.add(name.rpartition(".")[2])
    return found


def _roles(subject: Subject, made: Instance) -> set[str]:
    """Every role must be named."""
    naming, found = subject.spec.naming_spec, roles_in_layers(subject, made)
    if naming is not None and (missing := found - set(naming.layer_linear_names)):
        subject.wrong(
            "naming_spec.layer_linear_names",
            f"{naming.layer_linear_names} lack {listed(missing)}",
            f"add {listed(map(repr, missing))}",
        )
    return found


def _by_names(
    subject: Subject, made: Instance, tensors: dict[str, TensorShape], config: dict[str, Any]
) -> None:
    """What names alone tell must be what the model tells."""
    spec = subject.spec
    try:
        from_model = structure_of(made.model, tensors, spec)
        from_names = structure_from_names(tensors, spec, config)
    except UnlikeLayersError as error:
        subject.open(f"naming_spec: planning asks the model, for {error}")
        return
    except UnclearNamesError as error:
        subject.wrong(
            "naming_spec",
            f"{type(made.model).__name__} cannot be understood from names: {error}",
            "give layer_lists, embedding_names, head_names and layer_count_keys as on disk, or "
            "leave naming_spec out",
        )
        return
    for what, one, other in _differences(subject, from_model, from_names):
        subject.wrong(
            f"naming_spec.{what}",
            f"names tell {listed(other - one)} and not {listed(one - other)}, which the model has",
            "correct the names",
        )


def _differences(
    subject: Subject, model: Structure, names: Structure
) -> list[tuple[str, frozenset[str], frozenset[str]]]:
    """What differs, but for what the spec leaves out anyway."""

    def layers(structure: Structure) -> frozenset[str]:
        return frozenset(u.name.rpartition(".")[2] for u in structure.units if u.is_layer)

    def kept(linear: frozenset[str]) -> frozenset[str]:
        return frozenset(n for n in linear if not _left_out(subject, n.removesuffix(".weight")))

    pairs = [
        ("layer_linear_names", kept(model.linear), kept(names.linear)),
        ("head_names", model.heads, names.heads),
        ("is_tied", model.tied_heads, names.tied_heads),
        ("layer_lists", layers(model), layers(names)),
    ]
    return [(what, one, other) for what, one, other in pairs if one != other]


def _left_out(subject: Subject, name: str) -> bool:
    """Whether a matrix is a router, or matched by a glob of modules left alone."""
    routed = any(f".{router}." in f".{name}." for router in subject.ptq.router_names)
    return routed or any(match_part(glob, name) for glob in subject.ptq.skip_modules)
