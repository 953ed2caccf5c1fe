"""Choose a configuration from what is known of a model, before any weight is loaded.

A registered model's spec names its decoder layers, MoE blocks, routers and shared experts. A model
without one is read by its structure: the longest list of modules are its layers, and MoE blocks are
recognised by name and build.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor, nn

from modelopt_lite.errors import StrategyComputeError
from modelopt_lite.models import ModelSpec, get_spec, hf_model_type, is_moe, match_moe_block
from modelopt_lite.models.specs import ptq_facts
from modelopt_lite.offload.cargo import ALIGN
from modelopt_lite.offload.config import OffloadConfig
from modelopt_lite.offload.device import Device, current_device
from modelopt_lite.offload.expertgroups import (
    ExpertGroup,
    StackedExperts,
    split_to_fit,
    stacked_parameters,
    without,
)
from modelopt_lite.offload.places import has_forward
from modelopt_lite.offload.selection import select
from modelopt_lite.offload.units import find_units

_BLOCKS = (2, 1)  # one that computes and one that is filled; or one that does both in turn


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadPlan:
    """What `auto_config` chose, and from what.

    Attributes:
        model_type: Asked for, or the model's own; None where neither is known.
        has_spec: Whether a spec is registered for it.
        layer_classes: Classes of the decoder layers.
        units: Path -> bytes that come and go with it.
        resident: Path -> bytes of what stays on the device: modules outside of all units as wholes,
            parts of units one by one.
        moe_blocks: Path -> number of routed experts.
        expert_groups: Where blocks are too large for the budget; else empty.
        ep_bytes: Degree of expert parallelism that divides the experts -> bytes of weights that
            each rank would have without offloading. Empty for a dense model, and where the
            spec says that this model cannot be sharded.
        budget: Bytes for weights on the device; None: no limit.
        config: The configuration.
        notes: What was assumed or could not be done.
    """

    model_type: str | None
    has_spec: bool
    layer_classes: tuple[str, ...]
    units: Mapping[str, int]
    resident: Mapping[str, int]
    moe_blocks: Mapping[str, int]
    expert_groups: tuple[ExpertGroup, ...]
    ep_bytes: Mapping[int, int]
    budget: int | None
    config: OffloadConfig
    notes: tuple[str, ...]

    @property
    def unit_bytes(self) -> int:
        """Bytes of all units."""
        return sum(self.units.values())

    @property
    def resident_bytes(self) -> int:
        """Bytes that stay whatever the strategy."""
        return sum(self.resident.values())


def auto_config(
    model: nn.Module,
    model_type: str | None = None,
    budget: int | None = None,
    *,
    device: Device | None = None,
) -> OffloadConfig:
    """Choose a configuration; see `plan_offload`."""
    return plan_offload(model, model_type, budget, device=device).config


def plan_offload(
    model: nn.Module,
    model_type: str | None = None,
    budget: int | None = None,
    *,
    device: Device | None = None,
) -> OffloadPlan:
    """Choose units, what stays on the device, and the configuration for both.

    Decoder layers are the units. Routers, norms and shared experts stay on the device if they fit
    into the budget beside two blocks; where two whole layers do not fit, layers are split into
    their parts and MoE blocks into experts, or groups of stacked ones. Embeddings and the head
    stay unless the budget is too small for them. One block is the last resort.

    Args:
        model: The model; only its structure is read, and it may be on the meta device.
        model_type: ``config.model_type``. None: the model's own.
        budget: Bytes for weights on the device. None: no limit; the strategy then keeps passes
            from getting longer.
        device: Whose memory the budget is a part of. None: this machine's.

    Raises:
        StrategyComputeError: The budget is less than what cannot be split needs; the error's
            ``smallest_budget`` says how much that is.
    """
    return _Planner(model, model_type or hf_model_type(model), budget).plan(device)


@dataclass(slots=True)
class _Choice:
    """Patterns that are tried, from the one with the most on the device to the least."""

    include: list[str]
    exclude: list[str] = field(default_factory=list)
    split: bool = False


class _Planner:
    def __init__(self, model: nn.Module, model_type: str | None, budget: int | None) -> None:
        self.model = model
        self.model_type = model_type
        self.budget = budget
        self.spec: ModelSpec | None = get_spec(model_type) if model_type else None
        self.facts = ptq_facts(self.spec)
        self.notes: list[str] = []
        self._parameters = dict(model.named_parameters())
        self.layers = self._find_layers()
        self.blocks = self._find_blocks()

    def plan(self, device: Device | None) -> OffloadPlan:
        choice = self._choose()
        include, exclude = choice.include, choice.exclude
        units, resident = self._sizes(include, exclude)
        fraction = None
        if self.budget is not None:
            total = (device or current_device()).memory_info().total
            fraction = min(math.nextafter(self.budget / total, 1.0), 1.0)  # not a byte less
        config = OffloadConfig(
            include_patterns=include, exclude_patterns=exclude, max_gpu_mem_fraction=fraction
        )
        experts = {path: len(_experts(block)) or _stacked(block) for path, block in self.blocks}
        groups = tuple(self._groups(choice, sum(resident.values())))
        if groups and any(stacked_parameters(getattr(b, "experts", None)) for _, b in self.blocks):
            self.notes.append(
                "stacked experts come in by groups, which needs them computed one by one: "
                "set_experts_implementation('eager')"
            )
        return OffloadPlan(
            model_type=self.model_type,
            has_spec=self.spec is not None,
            layer_classes=tuple(dict.fromkeys(type(m).__name__ for m in self.layers.values())),
            units=units,
            resident=resident,
            moe_blocks=experts,
            expert_groups=groups,
            ep_bytes=self._ep_bytes(experts),
            budget=self.budget,
            config=config,
            notes=tuple(self.notes),
        )

    def _find_layers(self) -> dict[str, nn.Module]:
        units = [u.name for u in find_units(self.model, self.facts.layer_names) if u.is_layer]
        layers = {name: self.model.get_submodule(name) for name in units}
        if self.spec is None:
            what = f"model type {self.model_type!r}" if self.model_type else "a model of no type"
            where = next(iter(layers), "").rpartition(".")[0]
            self.notes.append(
                f"{what} has no spec; its {len(layers)} layers were found by structure, as the "
                f"longest list of modules ({where!r})"
                if layers
                else f"{what} has no spec, and no list of modules that could be its layers"
            )
        return layers

    def _find_blocks(self) -> list[tuple[str, nn.Module]]:
        found: list[tuple[str, nn.Module]] = []
        for name, module in self.model.named_modules():
            inside = any(name.startswith(f"{path}.") for path, _ in found)
            known = self.spec is not None and match_moe_block(module, self.model_type) is not None
            if name and not inside and (known or is_moe(module, self.model_type)):
                found.append((name, module))
        if found and self.spec is None:
            self.notes.append(f"{len(found)} MoE blocks were recognised by name and build")
        return found

    def _choose(self) -> _Choice:
        """Take the first choice that fits, with two blocks if there is one."""
        choices = [choice for choice in self._choices() if choice.include]
        needed: dict[int, int] = {}
        for blocks in _BLOCKS:
            for choice in choices:
                _, resident = self._sizes(choice.include, choice.exclude)
                need = sum(resident.values()) + blocks * self._largest(choice)
                needed[blocks] = min(need, needed.get(blocks, need))
                if self.budget is None or need <= self.budget:
                    self._tell(choice, blocks)
                    return choice
        least = min(needed.values())
        raise StrategyComputeError(
            f"the budget is {self.budget:,} bytes, and the least that this model can be run with "
            f"is {least:,}: what stays, and the largest part that can be streamed",
            smallest_budget=least,
        )

    def _tell(self, choice: _Choice, blocks: int) -> None:
        if choice.split:
            self.notes.append("two layers exceed the budget and are split into parts")
        if blocks == 1:
            self.notes.append("the budget holds one block: nothing is brought in ahead of time")

    def _largest(self, choice: _Choice) -> int:
        """Bytes of the largest unit in a block, where each tensor has a place that is aligned."""
        sizes = {name: -(-_nbytes(p) // ALIGN) * ALIGN for name, p in self._parameters.items()}
        offloaded = select(self.model, choice.include, choice.exclude).offloaded
        split = self._stacked(offloaded, budget=0) if choice.split else []
        parts = [sum(sizes[n] for n in names) for names in without(offloaded, split).values()]
        return max((*parts, *(experts.expert_bytes for experts in split)), default=0)

    def _stacked(
        self, offloaded: Mapping[str, Sequence[str]], budget: int, resident: int = 0
    ) -> list[StackedExperts]:
        return split_to_fit(self.model, offloaded, budget, resident, lambda _: True)

    def _choices(self) -> Iterator[_Choice]:
        whole = self._layer_patterns()
        keep = self._kept_parts()
        outside = self._outside_patterns()
        parts = self._part_patterns()
        yield _Choice(whole, keep)
        yield _Choice(whole)
        if parts:  # before the embeddings: parts are no more bytes to bring in than wholes
            yield _Choice(parts, keep, split=True)
            yield _Choice(parts, split=True)
        yield _Choice([*whole, *outside])
        yield _Choice([*parts, *outside], split=bool(parts))

    def _layer_patterns(self) -> list[str]:
        """Name layers by class where all of a class are layers, else by path."""
        if not self.layers:
            return ["*"]
        ids = {id(module) for module in self.layers.values()}
        patterns: dict[str, None] = {}
        for path, module in self.layers.items():
            same = [m for m in self.model.modules() if type(m) is type(module)]
            by_class = all(id(m) in ids for m in same)
            patterns[f"class:{type(module).__name__}" if by_class else _starred(path)] = None
        return list(patterns)

    def _kept_parts(self) -> list[str]:
        """Routers, shared experts and norms of the layers."""
        storage = self.spec.expert_storage_spec if self.spec else None
        shared = storage.shared_expert_names if storage else ("shared_expert", "shared_experts")
        patterns: dict[str, None] = {}
        for path, block in self.blocks:
            for name, _ in block.named_children():
                if name in self.facts.router_names or name in shared:
                    patterns[_starred(f"{path}.{name}")] = None
        for path, layer in self.layers.items():
            for name, module in layer.named_modules():
                if name and _is_norm(module):
                    patterns[_starred(f"{path}.{name}")] = None
        return list(patterns)

    def _part_patterns(self) -> list[str]:
        """The children of layers, and experts in the place of MoE blocks."""
        blocks = dict(self.blocks)
        patterns: dict[str, None] = {}
        for path, layer in self.layers.items():
            for name, child in layer.named_children():
                place = f"{path}.{name}"
                if place in blocks:
                    inner = [f"{place}.{at}" for at, _ in _experts(child)]
                    own = [f"{place}.{n}" for n, m in child.named_children() if has_forward(m)]
                    for part in (*inner, *own):
                        patterns[_starred(part)] = None
                elif has_forward(child):
                    patterns[_starred(place)] = None
        return list(patterns)

    def _outside_patterns(self) -> list[str]:
        """The modules outside of layers that hold weights."""
        units = find_units(self.model, self.facts.layer_names)
        return [f"name:{u.name}" for u in units if u.name and not u.is_layer and u.entries]

    def _sizes(
        self, include: Sequence[str], exclude: Sequence[str]
    ) -> tuple[dict[str, int], dict[str, int]]:
        """Return bytes of the units, and of what stays."""
        selection = select(self.model, include, exclude)
        sizes = {name: _nbytes(p) for name, p in self.model.named_parameters()}
        units = {
            path: sum(sizes[name] for name in names)
            for path, names in selection.offloaded.items()
            if names
        }
        resident: dict[str, int] = {}
        for name in selection.resident:
            resident[_owner(name)] = resident.get(_owner(name), 0) + sizes[name]
        for name, buffer in self.model.named_buffers():
            resident[_owner(name)] = resident.get(_owner(name), 0) + _nbytes(buffer)
        return units, resident

    def _groups(self, choice: _Choice, resident: int) -> Iterator[ExpertGroup]:
        if not choice.split or self.budget is None:
            return
        offloaded = select(self.model, choice.include, choice.exclude).offloaded
        for each in self._stacked(offloaded, self.budget, resident):
            for rows in each.groups.values():
                names = tuple(f"{each.path}[{row}]" for row in rows)
                owner = each.path.rpartition(".")[0]
                yield ExpertGroup(owner, names, len(rows) * each.expert_bytes)
        for path, block in self.blocks:
            experts = [(f"{path}.{name}", _weight_bytes(m)) for name, m in _experts(block)]
            room = max(self.budget - resident, 0)
            group: list[str] = []
            used = 0
            for name, size in experts:
                if group and used + size > room:
                    yield ExpertGroup(path, tuple(group), used)
                    group, used = [], 0
                group.append(name)
                used += size
            if group:
                yield ExpertGroup(path, tuple(group), used)

    def _ep_bytes(self, experts: Mapping[str, int]) -> dict[int, int]:
        counts = {count for count in experts.values() if count}
        ep = self.spec.ep_spec if self.spec else None
        if ep is not None and ep.unsupported:
            self.notes.append(f"no expert parallelism: {ep.unsupported}")
            return {}
        if not counts:
            return {}
        total = _weight_bytes(self.model)
        routed = sum(_routed_bytes(block) for _, block in self.blocks)
        degrees = [d for d in range(1, min(counts) + 1) if all(c % d == 0 for c in counts)]
        return {degree: total - routed + routed // degree for degree in degrees}


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _weight_bytes(module: nn.Module) -> int:
    return sum(map(_nbytes, module.parameters()))


def _owner(name: str) -> str:
    return name.rpartition(".")[0] or name


def _starred(path: str) -> str:
    """Return the pattern of a path with a star for each number."""
    return ".".join("*" if part.isdigit() else part for part in path.split("."))


def _is_norm(module: nn.Module) -> bool:
    """Whether a module is a norm: by its class's name, and all it holds are vectors."""
    vectors = all(p.ndim <= 1 for p in module.parameters())
    return "norm" in type(module).__name__.lower() and vectors


def _experts(block: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return a block's experts where each is a module, with their paths in the block."""
    container = getattr(block, "experts", None)
    if not isinstance(container, nn.ModuleList | nn.ModuleDict):
        return []
    return [(f"experts.{name}", expert) for name, expert in container.named_children()]


def _stacked(block: nn.Module) -> int:
    """Return the number of experts where they are stacked."""
    stacked = stacked_parameters(getattr(block, "experts", None))
    return next((int(p.shape[0]) for p in stacked.values()), 0)


def _routed_bytes(block: nn.Module) -> int:
    container = getattr(block, "experts", None)
    return _weight_bytes(container) if isinstance(container, nn.Module) else 0
