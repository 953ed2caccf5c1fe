"""A first draft of a spec, from what small models of a type show."""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass, field

from packaging.version import Version
from torch import nn

from modelopt_lite.checkpoint.names import NameMap
from modelopt_lite.doctor.anatomy import Block, child_of, layer_lists, norms_in
from modelopt_lite.doctor.disk import outside_layers, tower_of
from modelopt_lite.doctor.draft_names import draft_naming, unique
from modelopt_lite.doctor.feeds import readers_of_norms, siblings
from modelopt_lite.doctor.instance import Instance
from modelopt_lite.doctor.laws import (
    judge,
    rows_on_disk,
    single,
    single_on_disk,
    stacked,
    stacks_by_name,
)
from modelopt_lite.doctor.norms import adds_one
from modelopt_lite.doctor.sharding import configs_with_plan, names_below
from modelopt_lite.doctor.subject import Subject
from modelopt_lite.models import is_moe
from modelopt_lite.models.specs import (
    STRUCTURAL_PTQ,
    EPSpec,
    ExpertStorageSpec,
    ExportSpec,
    ModelSpec,
    MoESpec,
    PTQSpec,
)
from modelopt_lite.offload.units import text_model

# What engines call experts that only ever lie in stacks: Mixtral's where blocks are called as its.
_USUAL = ("gate_proj", "up_proj", "down_proj")
_MIXTRAL = ("w1", "w3", "w2")
_STACKS = ("gate_up_proj", "down_proj")
_CONVENTIONS = (_USUAL, _MIXTRAL, _USUAL[1:])


@dataclass
class Draft:
    """A spec, and what is still to be found out, by field."""

    spec: ModelSpec
    todo: dict[str, str] = field(default_factory=dict)


def draft_spec(model_type: str, made: list[Instance], *, remote_code: bool) -> Draft:
    """Describe a model type as its small models show it.

    Args:
        model_type: That of the config.
        made: Small models of it.
        remote_code: Their code came with a checkpoint.
    """
    import transformers

    todo: dict[str, str] = {}
    subject = Subject(ModelSpec(model_type=model_type), made)
    installed = Version(transformers.__version__)
    blocks = _blocks(subject)
    moe, storage = _experts(blocks, todo) if blocks else _unknown_experts(made, todo)
    layers = _layer_names(made)
    ptq = PTQSpec(layer_names=layers, router_names=unique(r for _, b in blocks for r in b.routers))
    spec = ModelSpec(
        model_type=model_type,
        min_transformers_version=None if remote_code else f"{installed.major}.{installed.minor}",
        modeling_source="remote_code" if remote_code else "transformers",
        moe_spec=moe,
        ptq_spec=ptq,
        expert_storage_spec=storage,
    )
    if not remote_code:
        todo["min_transformers_version"] = "the first release with these classes, if it is earlier"
    spec = dataclasses.replace(spec, ptq_spec=_ptq(Subject(spec, made)))
    spec = dataclasses.replace(
        spec,
        export_spec=_export(Subject(spec, made)),
        ep_spec=_sharding(Subject(spec, made), todo) if moe is not None else None,
        naming_spec=None if remote_code else draft_naming(Subject(spec, made)),
    )
    return Draft(spec, todo)


def _blocks(subject: Subject) -> list[tuple[Instance, Block]]:
    """Return the blocks of the text model, all where it has none; an attention's are left alone."""
    found = [(m, b) for m in subject.instances for b in subject.blocks[id(m)]]
    found = [(m, b) for m, b in found if "atten" not in b.path.casefold()]
    inside = [set(text_model(m.model).modules()) for m in subject.instances]
    return [(m, b) for m, b in found if any(b.module in modules for modules in inside)] or found


def _experts(
    blocks: list[tuple[Instance, Block]], todo: dict[str, str]
) -> tuple[MoESpec | None, ExpertStorageSpec | None]:
    """Describe the blocks and their experts."""
    classes = unique(type(b.module).__name__ for _, b in blocks)
    container = next((b.container for _, b in blocks if b.container), "experts")
    storage = ExpertStorageSpec(container=container, shared_expert_names=_shared(blocks))
    made, block = next(((m, b) for m, b in blocks if b.module in m.calls), blocks[0])
    if (order := _single_names(made, block, storage)) is None:
        todo["expert_storage_spec.linear_names"] = "gate, up and down, in this order"
        names = _names_of_one(made, block, storage)
        order = next((c for c in _CONVENTIONS if set(c) == names), ())
    storage = dataclasses.replace(storage, linear_names=order)
    if block.stacks and (found := _stack_names(made, block, storage)) is not None:
        storage = found
    elif block.stacks:
        todo["expert_storage_spec.stacked_names"] = f"among {', '.join(block.stacks)}"
        if set(block.stacks) == {*_STACKS}:
            storage = dataclasses.replace(storage, stacked_names=_STACKS)
    elif len(order) == 3:
        storage = dataclasses.replace(storage, stacked_names=_STACKS)
    return _moe(classes, made, block, storage, todo)


def _unknown_experts(
    made: list[Instance], todo: dict[str, str]
) -> tuple[MoESpec | None, ExpertStorageSpec | None]:
    """Describe blocks that are so by name alone; (None, None) for a dense model."""
    # Of no type, a module is judged by its name and structure, whatever is registered.
    named = [m for one in made for m in one.model.modules() if is_moe(m, "")]
    if not named:
        return None, None
    todo["moe_spec.expert_linear_names"] = (
        "experts of an unknown kind: leave them out, or name them"
    )
    return MoESpec(block_names=unique(type(m).__name__ for m in named)), ExpertStorageSpec()


def _moe(
    classes: tuple[str, ...],
    made: Instance,
    block: Block,
    storage: ExpertStorageSpec,
    todo: dict[str, str],
) -> tuple[MoESpec, ExpertStorageSpec]:
    order = storage.linear_names
    flat = any(p.ndim == 2 for p in block.stacks.values())  # all experts' rows in one matrix
    if flat or (not order and storage.stacked_names and "linear_names" not in str(todo)):
        if flat or _whole(made, block, storage):
            todo["expert_storage_spec.export_stacked"] = "do engines read the stacks as they are?"
            moe = MoESpec(
                block_names=classes,
                expert_linear_names=storage.stacked_names or tuple(block.stacks),
                fused_expert_names=True,
            )
            return moe, dataclasses.replace(storage, export_stacked=True)
        gated = any(r > 1 for r in _widths(made, block, storage))
        usual = _MIXTRAL if block.path.endswith("block_sparse_moe") else _USUAL
        order = usual if gated else _USUAL[1:]
        todo["expert_storage_spec.linear_names"] = "what engines call the experts one by one"
        storage = dataclasses.replace(storage, linear_names=order)
    moe = MoESpec(
        block_names=classes,
        expert_linear_names=order or None,
        gate_up_pair=(order[0], order[1]) if len(order) == 3 else None,
    )
    return moe, storage


def _whole(made: Instance, block: Block, storage: ExpertStorageSpec) -> bool:
    """Whether stacks are likely read as they are: with biases, alternating, or bare and turned."""
    alternating = storage.interleaved_gate_up and not rows_on_disk(made, block)
    on_disk = [name for name, info in made.saved[0].items() if len(info.shape) == 3]
    bare = any(name.rpartition(".")[2] in storage.stacked_names for name in on_disk)
    return _biased(block) or alternating or (bare and storage.input_major)


def _biased(block: Block) -> bool:
    """Whether each expert has biases of its own."""
    container = child_of(block.module, block.container) if block.container else block.module
    return isinstance(container, nn.Module) and any(
        name.endswith("bias") and p.ndim == 2 and len(p) == block.count
        for name, p in container.named_parameters()
    )


def _widths(made: Instance, block: Block, storage: ExpertStorageSpec) -> list[int]:
    """How many matrices each stack but the last holds."""
    matrices = stacked(made, block, storage)
    stacks = len(storage.stacked_names)
    return [2 if matrices and len(matrices[0]) > stacks else 1, len(matrices[0]) - 1]


def _shared(blocks: list[tuple[Instance, Block]]) -> tuple[str, ...]:
    from modelopt_lite.doctor.classes import dense_children

    return unique(name for _, block in blocks for name in dense_children(block))


def _single_names(
    made: Instance, block: Block, storage: ExpertStorageSpec
) -> tuple[str, ...] | None:
    """Return the names of single experts as (gate, up, down), () without any; None if unclear."""
    found = _names_of_one(made, block, storage)
    if not found:
        return ()
    if block.module not in made.calls or not (block.experts or isinstance(made.names, NameMap)):
        return None
    for order in itertools.permutations(sorted(found)):
        if block.experts:
            matrices = single(block, order)
        else:
            named = dataclasses.replace(storage, linear_names=order)
            assert isinstance(made.names, NameMap)
            matrices = single_on_disk(made, block, made.names, named)
        if matrices and judge(made, block, matrices) == "holds":
            return order
    return None


def _names_of_one(made: Instance, block: Block, storage: ExpertStorageSpec) -> set[str]:
    """Return the names of one expert's linears in memory, or on disk where memory stacks them."""
    if block.experts:
        return {n for n, m in block.experts[0].named_modules() if isinstance(m, nn.Linear)}
    modules = (n.removesuffix(".weight") for n in made.saved[0])
    return {m.rpartition(".")[2] for m in modules if storage.expert_of(m)[0] is not None}


def _stack_names(
    made: Instance, block: Block, storage: ExpertStorageSpec
) -> ExpertStorageSpec | None:
    """Return the section with the names and layout of the stacks; None if unclear."""
    if block.module not in made.calls:
        return None
    by_name = stacks_by_name(made, block)
    storage = dataclasses.replace(storage, stacked_parent=_parent_on_disk(made, block, storage))
    on_disk = {n: t for n, t in by_name.items() if n not in block.stacks}
    # Where the disk has stacks of its own names, those are meant; else the names in memory.
    weights = [name for name, p in (on_disk or by_name).items() if p.ndim == 3]
    for names in itertools.permutations(weights):
        for major, interleaved in itertools.product((False, True), repeat=2):
            named = dataclasses.replace(
                storage, stacked_names=names, input_major=major, interleaved_gate_up=interleaved
            )
            matrices = stacked(made, block, named)
            if matrices and judge(made, block, matrices) == "holds":
                return named
    return None


def _parent_on_disk(made: Instance, block: Block, storage: ExpertStorageSpec) -> str | None:
    """Return where in the block stacks lie on disk, where that is not the container."""
    state = made.model.state_dict(keep_vars=True)
    own = {id(parameter) for parameter in block.stacks.values()}
    names = made.names
    depth = len(block.path.split("."))
    for source, (entry, region) in names.places.items() if isinstance(names, NameMap) else ():
        if id(state[entry]) in own and not region:
            parent = source.removesuffix(".weight").rpartition(".")[0]
            inside = ".".join(parent.split(".")[depth:])
            return None if f".{parent}".endswith(f".{storage.container}") else inside
    return None


def _layer_names(made: list[Instance]) -> tuple[str, ...]:
    """Return the classes of the layers of the text model."""
    found: list[str] = []
    for one in made:
        inside = set(text_model(one.model).modules())
        lists = [ls for ls in layer_lists(one.model).values() if ls[0] in inside]
        longest = max(lists, key=len, default=nn.ModuleList())
        found += [type(layer).__name__ for layer in longest]
    return unique(found)


def _ptq(subject: Subject) -> PTQSpec:
    """Fill in what a forward pass and the names on disk show."""
    moe, ptq = subject.spec.moe_spec, subject.ptq
    groups = [
        group
        for group in STRUCTURAL_PTQ.fused_linears
        if any(
            siblings(layer, group)
            for made in subject.instances
            for layer in subject.layers(made).values()
        )
    ]
    if moe is not None and moe.gate_up_pair and moe.gate_up_pair not in groups:
        groups.append(moe.gate_up_pair)
    feeds: dict[str, dict[str, None]] = {}
    for made in subject.instances:
        for path, layer in subject.layers(made).items():
            for norm, readers in readers_of_norms(subject, made, layer).items():
                for reader in sorted({*readers, *_lists_behind(subject, made, layer, readers)}):
                    names = _spellings(subject, made, path, reader)
                    feeds.setdefault(norm, {}).update(dict.fromkeys(names))
    towers = {
        glob
        for made in subject.instances
        for name in outside_layers(subject, made)
        for glob in (f"*{tower_of(name)}*",)
    }
    convolutions = {
        f"*.{name.rpartition('.')[2]}"
        for made in subject.instances
        for layer in subject.layers(made).values()
        for name, m in layer.named_modules()
        if isinstance(m, nn.Conv1d | nn.Conv2d | nn.Conv3d)
    }
    return dataclasses.replace(
        ptq,
        skip_modules=(*sorted(towers), *sorted(convolutions)),
        fused_linears=tuple(groups),
        norm_feeds=tuple((norm, tuple(readers)) for norm, readers in feeds.items()),
        key_value_names=_key_value_names(subject),
    )


def _lists_behind(
    subject: Subject, made: Instance, layer: nn.Module, readers: frozenset[str]
) -> set[str]:
    """Return the paths of experts in lists: they read copies of what their router reads."""
    inside = {m: n for n, m in layer.named_modules()}
    found = set()
    for block in subject.blocks[id(made)]:
        at = inside.get(block.module)
        routers = {f"{at}.{router}".lstrip(".") for router in block.routers}
        if at is not None and block.experts and routers & readers:
            found.add(f"{at}.{block.container}".lstrip("."))
    return found


def _spellings(subject: Subject, made: Instance, path: str, reader: str) -> list[str]:
    """Return a reader's path in a layer as on disk, and as in memory where that differs."""
    number, names = path.rpartition(".")[2], made.names
    found = []
    if isinstance(names, NameMap):
        for source, (entry, _) in names.places.items():
            if f"{entry}.".startswith(f"{path}.{reader}."):
                inside = source.removesuffix(".weight").partition(f".{number}.")[2]
                container = subject.storage.expert_of(inside)[1]
                stack = len(made.saved[0][source].shape) == 3
                leaf = stack and inside.rpartition(".")[2] in subject.storage.stacked_names
                found.append(container or (inside.rpartition(".")[0] if leaf else inside))
                break
    return list(dict.fromkeys([*found, reader]))


def _key_value_names(subject: Subject) -> tuple[str, str]:
    """k_proj and v_proj, or the one linear that makes queries, keys and values."""
    usual = PTQSpec().key_value_names
    for made in subject.instances:
        for layer in subject.layers(made).values():
            for module in layer.modules():
                children = {n for n, m in module.named_children() if isinstance(m, nn.Linear)}
                if "attention" not in type(module).__name__.casefold() or not children:
                    continue
                if set(usual) <= children or any(n.startswith("kv_") for n in children):
                    return usual
                if joined := [n for n in children if "qkv" in n.casefold()]:
                    return joined[0], joined[0]
    return usual


def _export(subject: Subject) -> ExportSpec | None:
    plus = unique(
        type(norm).__name__
        for made in subject.instances
        for layer in subject.layers(made).values()
        for norm in norms_in(layer).values()
        if adds_one(made, norm)
    )
    return ExportSpec(weight_plus_one_norm_names=plus) if plus else None


def _sharding(subject: Subject, todo: dict[str, str]) -> EPSpec | None:
    """None where the config has a plan at its root; else where it is, or one of our own."""
    made = subject.instances[0]
    plans = configs_with_plan(made.config)
    if "" in plans:
        return None
    if plans:
        return EPSpec(plan_config_attr=plans[0])
    block = next(b for b in subject.blocks[id(made)]) if subject.blocks[id(made)] else None
    if block is None or not block.stacks:
        return None
    names = names_below(made, made.config)
    prefix = block.container
    plan = {
        name: "grouped_gemm"
        for name in sorted(names)
        if prefix and any(name.endswith(f".{prefix}.{stack}") for stack in block.stacks)
    }
    if not plan:
        return None
    todo["ep_spec.base_model_ep_plan"] = "no run with sharded experts has tried this plan"
    return EPSpec(base_model_ep_plan=plan)
