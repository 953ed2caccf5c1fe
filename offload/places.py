"""Every path by which a module or parameter of a model is reached, and what patterns say of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torch import nn

from modelopt_lite.offload.patterns import Pattern


class Place(NamedTuple):
    """A path to a module; one that is reached by several paths has several places."""

    path: str  # "" for the model itself, which no pattern matches
    module: nn.Module
    first: bool  # the path that named_modules lists
    included: bool  # it, or a module above it, matches an include
    excluded: bool  # ... an exclude


class Holding(NamedTuple):
    """A name of a parameter, and the place of the module that holds it.

    ``included`` and ``excluded`` count for the name itself and all modules above.
    """

    path: str
    parameter: nn.Parameter
    place: Place
    included: bool
    excluded: bool


def walk(
    model: nn.Module, include: Sequence[Pattern], exclude: Sequence[Pattern]
) -> Iterator[Place]:
    """Yield the places of all modules, each before those below it, in document order.

    A module that is shared is yielded under every path, and so is what lies below it; a module
    that contains itself is not entered again.
    """
    seen: set[int] = set()
    root = Place("", model, True, False, False)
    stack: list[tuple[str, nn.Module, Place, frozenset[int]]] = [("", model, root, frozenset())]
    while stack:
        path, module, above, ancestors = stack.pop()
        place = Place(
            path,
            module,
            id(module) not in seen,
            above.included or bool(path and matches_module(include, path, module, spans=False)),
            above.excluded or bool(path and matches_module(exclude, path, module, spans=True)),
        )
        seen.add(id(module))
        yield place
        inside = ancestors | {id(module)}
        for name, child in reversed(module._modules.items()):
            if child is not None and id(child) not in inside:
                stack.append((f"{path}.{name}" if path else name, child, place, inside))


def holdings(
    place: Place, include: Sequence[Pattern], exclude: Sequence[Pattern]
) -> Iterator[Holding]:
    """Yield the parameters that the module of a place holds itself."""
    for leaf, parameter in place.module._parameters.items():
        if parameter is not None:
            path = f"{place.path}.{leaf}" if place.path else leaf
            included = any(p.matches_name(path, star_spans=False) for p in include)
            excluded = any(p.matches_name(path, star_spans=True) for p in exclude)
            yield Holding(
                path, parameter, place, place.included or included, place.excluded or excluded
            )


def matches_module(
    patterns: Sequence[Pattern], path: str, module: nn.Module, *, spans: bool
) -> bool:
    """Whether a pattern matches a module by its class or its path."""
    return any(
        p.matches_class(type(module)) or p.matches_name(path, star_spans=spans) for p in patterns
    )


def has_forward(module: nn.Module) -> bool:
    """Whether a module can be called: ModuleList, ModuleDict and ParameterList cannot."""
    of_class = getattr(type(module), "forward", None)
    return "forward" in vars(module) or of_class is not nn.Module.forward


def callable_below(path: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the outermost modules below one that can be called, with their paths."""
    for name, child in module.named_children():
        child_path = f"{path}.{name}"
        if has_forward(child):
            yield child_path, child
        else:
            yield from callable_below(child_path, child)


def paths_above(path: str) -> Iterator[str]:
    """Yield the paths of the modules above a path, the outermost first, the model's left out."""
    end = path.find(".")
    while end >= 0:
        yield path[:end]
        end = path.find(".", end + 1)
