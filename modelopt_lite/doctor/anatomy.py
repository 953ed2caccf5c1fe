"""The parts of a built model, found by what they are and not by what they are called."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

_ROUTERS = ("gate", "router")
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


@dataclass(frozen=True, slots=True)
class Block:
    """A mixture of experts.

    Attributes:
        path: Its name in the model.
        module: The innermost module that has both the experts and what chooses among them.
        container: Path of the experts inside of it; "" where they are its own children.
        experts: Modules of one expert each, or none where they are stacked.
        stacks: Name inside of the container -> parameter that holds all experts: of three axes,
            or of two, the experts' rows one below the other.
        count: How many experts, those without weights among them.
        routers: Children that choose experts, or that gate with one output.
    """

    path: str
    module: nn.Module
    container: str
    experts: tuple[nn.Module, ...]
    stacks: dict[str, torch.Tensor]
    count: int
    routers: tuple[str, ...]


def blocks_in(model: nn.Module) -> list[Block]:
    """Find the mixtures of experts of a model."""
    found: dict[str, Block] = {}
    for path, module in model.named_modules():
        experts, stacks, count = _experts_of(module)
        if not count:
            continue
        parts = path.split(".")
        for up in range(3):
            if up > len(parts) or not parts[0]:
                break
            inside = ".".join(parts[len(parts) - up :])
            outer = ".".join(parts[: len(parts) - up])
            block = model.get_submodule(outer)
            if isinstance(block, nn.ModuleList | nn.ModuleDict):
                continue
            routers = tuple(_routers(block, parts[len(parts) - up] if up else "", count, stacks))
            if any(name in _ROUTERS or _chooses(getattr(block, name), count) for name in routers):
                found.setdefault(
                    outer, Block(outer, block, inside, experts, stacks, count, routers)
                )
                break
    for flat in _flat_blocks(model):
        found.setdefault(flat.path, flat)
    return list(found.values())


def _flat_blocks(model: nn.Module) -> Iterator[Block]:
    """Yield blocks whose experts are stacked along the rows of matrices: [E * I, H] each."""
    for path, module in model.named_modules():
        flat = {n: p for n, p in module.named_parameters(recurse=False) if p.ndim == 2}
        if len(flat) < 2 or len({p.shape for p in flat.values()}) > 1:
            continue
        if any(True for child in module.children() for _ in child.parameters()):
            continue
        rows = next(iter(flat.values())).shape[0]
        parts = path.split(".")
        for up in (1, 2):
            block = model.get_submodule(".".join(parts[:-up]))
            for name, child in block.named_children():
                for linear in child.modules():
                    count = linear.out_features if isinstance(linear, nn.Linear) else 0
                    if name != parts[-up] and 1 < count < rows and rows % count == 0:
                        inside = ".".join(parts[-up:])
                        outer = ".".join(parts[:-up])
                        yield Block(outer, block, inside, (), dict(flat), count, (name,))


def _experts_of(module: nn.Module) -> tuple[tuple[nn.Module, ...], dict[str, torch.Tensor], int]:
    """Return the experts that a module holds: one module each, or stacked; and how many."""
    if isinstance(module, nn.ModuleList | nn.ModuleDict) and len(module) > 1:
        # Some lists end with experts without weights, which pass on what they read.
        children = tuple(c for c in module.children() if not isinstance(c, nn.Identity))
        alike = len(children) > 1 and len({type(child) for child in children}) == 1
        few = sum(isinstance(m, nn.Linear) for m in children[0].modules()) if alike else 0
        if 2 <= few <= 3 and not any(_attends(m) for m in children[0].modules()):
            return children, {}, len(module)
    stacks: dict[str, torch.Tensor] = {
        name: p
        for name, p in module.named_parameters(recurse=False)
        if p.ndim == 3 and not isinstance(module, _CONVOLUTIONS)
    }
    for name, child in module.named_children():
        weight = getattr(child, "weight", None)
        own = [p for p in child.parameters(recurse=False) if p.ndim > 1]
        is_stack = len(own) == 1 and isinstance(weight, torch.Tensor) and weight.ndim == 3
        if is_stack and not isinstance(child, _CONVOLUTIONS) and not list(child.children()):
            stacks[name] = own[0]
    sizes = {p.shape[0] for p in stacks.values()}
    # Some keep rows for experts without weights, which pass on what they read, in the first stack.
    alike = len(sizes) == 1 or "expert" in type(module).__name__.casefold()
    if len(stacks) >= 2 and alike and min(sizes) > 1:
        return (), stacks, min(sizes)
    return (), {}, 0


def _attends(module: nn.Module) -> bool:
    return "attention" in type(module).__name__.casefold()


def _routers(
    block: nn.Module, container: str, count: int, stacks: dict[str, torch.Tensor]
) -> Iterator[str]:
    """Yield the children of a block that have an output for each expert, or one in all."""
    for name, child in block.named_children():
        if name == container or (not container and name in stacks):
            continue
        gates = isinstance(child, nn.Linear) and child.out_features == 1
        called = name in _ROUTERS or "router" in type(child).__name__.casefold()
        if (
            gates
            or _chooses(child, count)
            or (called and any(p.ndim == 2 for p in child.parameters()))
        ):
            yield name


def _chooses(module: Any, count: int) -> bool:
    """Whether a module has a matrix with a row for each expert."""
    shapes = [tuple(p.shape) for p in module.parameters() if p.ndim == 2]
    linears = [m for m in module.modules() if isinstance(m, nn.Linear)]
    if not shapes or isinstance(module, nn.Embedding) or len(linears) > 4:
        return False
    return any(shape[0] == count for shape in shapes)


def layer_lists(model: nn.Module) -> dict[str, nn.ModuleList]:
    """Return the outermost lists of layers: of modules that attend, mix, or hold experts."""
    found: dict[str, nn.ModuleList] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module):
            if any(name.startswith(f"{outer}.") for outer in found):
                continue
            if sum(isinstance(m, nn.Linear) for m in module[0].modules()) >= 2:
                found[name] = module
    return found


def norms_in(layer: nn.Module) -> dict[str, nn.Module]:
    """Return the normalizations of a layer that have a weight, by their paths."""
    return {
        name: module
        for name, module in layer.named_modules()
        if "norm" in type(module).__name__.casefold()
        and isinstance(getattr(module, "weight", None), torch.Tensor)
        and module.weight.ndim == 1
    }


def child_of(module: nn.Module, path: str) -> Any:
    """Return what is at a path below a module, None where there is nothing or it passes through."""
    found: Any = module
    for part in filter(None, path.split(".")):
        found = getattr(found, part, None)
    return None if isinstance(found, nn.Identity) else found
