"""Units of a model: the modules whose weights come and go together.

Units partition the entries (parameters and persistent buffers) of a model: every decoder layer is
a unit, and outside of layers every module without children that holds entries, and every module
that reads its children's entries without running them. What another module with children holds
itself, outside of layers, is brought in at the start and stays.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

# torch's own attention multiplies by its output projection's weight without calling that module.
_READS_CHILDREN = (nn.MultiheadAttention,)


@dataclass(frozen=True, slots=True)
class Unit:
    """A module whose entries come and go together, or a part of one.

    Attributes:
        name: The module's name; a part of its experts has a name of its own.
        entries: Parameters and persistent buffers.
        is_layer: It is a decoder layer.
        parent: Of a part: the unit that is in memory while the part comes and goes.
        experts: Of a part: which experts it holds, of those in ``container``.
        is_stacked: Of a part: ``entries`` hold all experts along their first axis.
        count: Of a part: how many experts ``container`` has.
        of_stack: Of a part: its experts are rows of tensors on disk that hold all of them.
    """

    name: str
    entries: tuple[str, ...]
    is_layer: bool
    parent: str | None = None
    experts: range | None = None
    container: str = ""
    is_stacked: bool = False
    count: int = 0
    of_stack: bool = False


def find_units(model: nn.Module, layer_names: Iterable[str]) -> list[Unit]:
    """Split a model into units, in the order of ``named_modules``.

    Args:
        model: Any model; entries are those of its ``state_dict``.
        layer_names: Class names of decoder layers, compared with each module's class and its bases
            without regard to case. Where none is found, the children of the longest ModuleList
            of the text model that lies in no other one are taken.
    """
    wanted = {name.lower() for name in layer_names}
    named = [
        name
        for name, module in model.named_modules()
        if wanted & {cls.__name__.lower() for cls in type(module).__mro__}
    ]
    layers = set(_outermost(named) or _repeated_children(model))
    leaves = _leaf_names(model)
    entries: dict[str, list[str]] = {}
    for entry in model.state_dict(keep_vars=True):
        path = entry.rpartition(".")[0]
        unit = next((p for p in _prefixes(path) if p in layers), None) or leaves.get(path, "")
        entries.setdefault(unit, []).append(entry)
    names = [*(name for name, _ in model.named_modules() if name), ""]
    return [Unit(n, tuple(entries[n]), n in layers) for n in names if n in entries]


def _leaf_names(model: nn.Module) -> dict[str, str]:
    """Map the names of modules that come as a whole, and below them, to the first name of each.

    A module may have many names.
    """
    first = {id(module): name for name, module in model.named_modules()}
    leaves: dict[str, str] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        above = leaves.get(name.rpartition(".")[0])
        if above is not None:  # modules come before what is below them
            leaves[name] = above
        elif isinstance(module, _READS_CHILDREN) or next(module.children(), None) is None:
            leaves[name] = first[id(module)]
    return leaves


def _prefixes(name: str) -> Iterator[str]:
    """Yield a dotted name's beginnings, the shortest first."""
    end = name.find(".")
    while end >= 0:
        yield name[:end]
        end = name.find(".", end + 1)
    yield name


def _outermost(names: list[str]) -> list[str]:
    """Leave out names below other ones; those above come first."""
    kept: dict[str, None] = {}
    for name in names:
        if not any(prefix in kept for prefix in _prefixes(name)):
            kept[name] = None
    return list(kept)


def text_model(model: Any) -> Any:
    """Return what a composite model, with a vision tower say, runs text through; else the model."""
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "get_text_config") or config.get_text_config() is config:
        return model
    return model.get_decoder()


def output_head(model: Any) -> tuple[str, Any] | None:
    """Return the name and the module that turns hidden states into logits, if there is one."""
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    if head is None:
        return None
    return next(((name, m) for name, m in model.named_modules() if m is head), None)


def _repeated_children(model: nn.Module) -> list[str]:
    inside = set(text_model(model).modules())
    lists = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) and module in inside
    ]
    outer = set(_outermost([name for name, _ in lists]))
    candidates = [(len(module), name) for name, module in lists if name in outer]
    if not candidates:
        return []
    size, name = max(candidates, key=lambda pair: pair[0])
    return [f"{name}.{index}" for index in range(size)]
