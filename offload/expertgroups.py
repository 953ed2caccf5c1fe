"""Stacked experts that are too large for the device: brought in some at a time.

The model's own forward runs unchanged. While a container of stacked experts (parameters of shape
[experts, ...], as transformers 5 has them) runs, each ``parameter[expert]`` is served from a group
of experts that is brought in for it, as a label of its own. So results are bit-equal to those of
the whole container. Code that reads a stacked parameter in another way is refused.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from modelopt_lite.errors import OffloadError
from modelopt_lite.models import hf_model_type, is_moe
from modelopt_lite.offload.cargo import ALIGN
from modelopt_lite.offload.expert_parts import is_number
from modelopt_lite.offload.lazyparam import reads_values

OpenTrap = Callable[[str], AbstractContextManager[object]]


@dataclass(frozen=True, slots=True)
class StackedExperts:
    """A module that holds the experts of a block in stacked parameters.

    ``parameters`` are those by their full names; ``size`` is the number of experts of a group.
    """

    path: str
    module: nn.Module
    parameters: Mapping[str, nn.Parameter]
    size: int

    @property
    def count(self) -> int:
        """Number of experts."""
        return int(next(iter(self.parameters.values())).shape[0])

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert in a block."""
        rows = (p.numel() * p.element_size() // p.shape[0] for p in self.parameters.values())
        return sum(-(-row // ALIGN) * ALIGN for row in rows)

    @property
    def groups(self) -> dict[str, range]:
        """Label -> experts, in order."""
        starts = range(0, self.count, self.size)
        found = (range(start, min(start + self.size, self.count)) for start in starts)
        return {group_label(self.path, rows): rows for rows in found}


@dataclass(frozen=True, slots=True)
class ExpertGroup:
    """Experts of one block that are in memory at the same time, when the block as a whole is not.

    ``experts`` are their paths, or rows of stacked parameters. Those that are modules are streamed
    one by one, and a group is how many the budget holds at once; rows are streamed by groups.
    """

    block: str
    experts: tuple[str, ...]
    nbytes: int


def group_label(path: str, rows: range) -> str:
    """Return the label of a group of experts."""
    return f"{path}[{rows.start}:{rows.stop}]"


def moe_blocks(model: nn.Module, model_type: str | None) -> list[tuple[str, nn.Module]]:
    """Return the outermost MoE blocks with their paths."""
    found: list[tuple[str, nn.Module]] = []
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{path}.") for path, _ in found)
        if name and not inside and is_moe(module, model_type):
            found.append((name, module))
    return found


def stacked_parameters(container: object) -> dict[str, nn.Parameter]:
    """Return a container's parameters that have a row for each expert; {}, where none is stacked.

    They are those with as many rows as the ones of three dimensions.
    """
    if not isinstance(container, nn.Module):
        return {}
    own = dict(container.named_parameters(recurse=False))
    counts = {int(p.shape[0]) for p in own.values() if p.ndim == 3}
    if len(counts) != 1 or min(counts) < 2:
        return {}
    return {name: p for name, p in own.items() if p.ndim > 1 and p.shape[0] in counts}


def split_to_fit(
    model: nn.Module,
    offloaded: Mapping[str, Sequence[str]],
    budget: int | None,
    resident: int,
    can_split: Callable[[nn.Parameter], bool],
) -> list[StackedExperts]:
    """Choose the containers to be brought in by groups, and how many experts a group has.

    Args:
        model: The model.
        offloaded: Unit -> names of its parameters that may leave.
        budget: Bytes for weights on the device. None: nothing is split.
        resident: Bytes of them that stay whatever the strategy.
        can_split: Whether rows of a parameter can be brought in by themselves.

    Returns:
        Nothing where two of the largest units fit. Else the stacked experts of each unit of which
        two do not; two groups of them fit beside the rest of the largest unit, if two experts do.
        Experts that the model computes all at once are split only where not even one unit fits.
    """
    sizes = {n: _block_bytes(p) for n, p in model.named_parameters(remove_duplicate=False)}
    units = {label: sum(sizes[n] for n in names) for label, names in offloaded.items()}
    room = 0 if budget is None else budget - resident
    large = {label for label, size in units.items() if 2 * size > room}
    if budget is None or not large:
        return []
    unit_of = {name: label for label in large for name in offloaded[label]}
    names = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    found: list[StackedExperts] = []
    for path, block in moe_blocks(model, hf_model_type(model)):
        container = getattr(block, "experts", None)
        stacked = {f"{path}.experts.{n}": p for n, p in stacked_parameters(container).items()}
        mine = {
            name: p
            for name, p in stacked.items()
            if name in unit_of and names[id(p)] == 1 and p.is_contiguous() and can_split(p)
        }
        fits = all(units[unit_of[name]] <= room for name in mine)
        if mine and isinstance(container, nn.Module) and not (fits and _reads_all(container)):
            found.append(StackedExperts(f"{path}.experts", container, mine, 1))
    for each in found:
        for name in each.parameters:
            units[unit_of[name]] -= sizes[name]
    room -= max(units.values(), default=0)
    return [
        StackedExperts(e.path, e.module, e.parameters, _clamped(room // 2 // e.expert_bytes, e))
        for e in found
    ]


def _reads_all(container: nn.Module) -> bool:
    """Whether transformers is told to compute all experts at once."""
    config = getattr(container, "config", None)
    return getattr(config, "_experts_implementation", None) not in (None, "eager")


def without(
    owned: Mapping[str, Sequence[str]], split: Iterable[StackedExperts]
) -> dict[str, list[str]]:
    """Return what labels own beside the parameters that come in by groups."""
    gone = {name for experts in split for name in experts.parameters}
    return {label: [n for n in names if n not in gone] for label, names in owned.items()}


def _clamped(size: int, experts: StackedExperts) -> int:
    return min(max(size, 1), experts.count)


def _block_bytes(tensor: Tensor) -> int:
    return -(-tensor.numel() * tensor.element_size() // ALIGN) * ALIGN


class ServedExperts(TorchFunctionMode):
    """Serves single experts of a container while its forward runs.

    Args:
        experts: The container.
        rows: Label of a group -> name of a parameter -> the group's rows of it.
        trap: Opens the trap of a label.
        renew: Called with rows before they are used, inside of their trap.
    """

    def __init__(
        self,
        experts: StackedExperts,
        rows: Mapping[str, Mapping[str, Tensor]],
        trap: OpenTrap,
        renew: Callable[[Tensor], None],
    ) -> None:
        super().__init__()
        self._name_of = {id(p): name for name, p in experts.parameters.items()}
        self._groups = experts.groups
        self._label_of = {row: label for label, rows in self._groups.items() for row in rows}
        self._experts = experts
        self._rows = rows
        self._trap = trap
        self._renew = renew
        self._open = ExitStack()
        self._label: str | None = None
        self._served: list[weakref.ref[Tensor]] = []

    def leave(self) -> None:
        """Let the group that is in go."""
        self._label = None
        served, self._served = self._served, []
        for reference in served:
            if (value := reference()) is not None:  # the model's code keeps it, and may read it
                with torch.inference_mode(value.is_inference()):
                    value.data = value.data.clone()
        self._open.close()

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Look at one torch function call."""
        name = self._name_of.get(id(args[0])) if args else None
        if name is not None and getattr(func, "__name__", "") == "__getitem__":
            first, *rest = args[1] if isinstance(args[1], tuple) else (args[1],)
            if is_number(first):
                return self._serve(func, name, int(first), rest)
        if reads_values(func):
            used = (self._name_of.get(id(leaf)) for leaf in tree_leaves((args, kwargs)))
            if name := next((found for found in used if found is not None), None):
                raise OffloadError(
                    f"{getattr(func, '__name__', func)} reads all experts of {name!r} at once, and "
                    f"the budget holds {self._experts.size} at a time; let the model compute them "
                    "one by one (set_experts_implementation('eager')), or raise the budget"
                )
        return func(*args, **(kwargs or {}))

    def _serve(self, func: Callable[..., Any], name: str, expert: int, rest: list[Any]) -> Any:
        expert %= self._experts.count
        label = self._label_of[expert]
        if label != self._label:
            self.leave()
            self._open.enter_context(self._trap(label))
            self._label = label
            for rows in self._rows[label].values():
                self._renew(rows)
        start = self._groups[label].start
        value = func(self._rows[label][name], (expert - start, *rest))
        self._served.append(weakref.ref(value))
        return value


@contextmanager
def serving(
    experts: StackedExperts,
    rows: Mapping[str, Mapping[str, Tensor]],
    trap: OpenTrap,
    renew: Callable[[Tensor], None],
) -> Iterator[None]:
    """Serve a container's experts inside of a block; see `ServedExperts`."""
    served = ServedExperts(experts, rows, trap, renew)
    try:
        with served:
            yield
    finally:
        served.leave()
