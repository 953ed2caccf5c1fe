"""Which tensors belong to which trap (seed 003): ownership, observed modules, then names."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from modelopt_lite.offload.cargo import Managed, inner_fields


def with_fields(name: str, tensor: Tensor) -> list[Managed]:
    """Return a tensor and the tensors attached to it, which move together with it."""
    fields = (Managed(f"{name}.{field}", tensor, field) for field in inner_fields(tensor))
    return [Managed(name, tensor), *fields]


class ModuleTracker:
    """Notes which modules run inside of which manual trap (strategy 2)."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._current: list[str] = []
        self._seen: dict[str, dict[str, nn.Module]] = {}
        self._hooks: list[Any] = []
        for name, module in model.named_modules():
            if next(module.parameters(recurse=False), None) is not None:
                self._hooks.append(module.register_forward_pre_hook(self._hook(name)))

    def enter_trap(self, trap_name: str) -> None:
        """Attribute what runs from now on to a trap."""
        self._current.append(trap_name)
        self._seen.setdefault(trap_name, {})

    def exit_trap(self) -> None:
        """Go back to the trap that was open before."""
        self._current.pop()

    def tensors(self, allowed: Callable[[str], bool]) -> dict[str, list[Managed]]:
        """Return each trap's tensors: those of its modules that may leave the device.

        A parameter that ran in two traps is of the first, and both are told to bring it in.
        """
        found: dict[str, list[Managed]] = {}
        for trap, modules in self._seen.items():
            mine: list[Managed] = []
            for path, module in modules.items():
                for leaf, parameter in module.named_parameters(recurse=False):
                    name = f"{path}.{leaf}" if path else leaf
                    if allowed(name):
                        mine += with_fields(name, parameter)
            found[trap] = mine
        return found

    def remove(self) -> None:
        """Take the hooks off."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _hook(self, name: str) -> Callable[[nn.Module, Any], None]:
        def hook(module: nn.Module, args: Any) -> None:
            if self._current:
                self._seen[self._current[-1]][name] = module

        return hook


def match_prefixes(traced: Mapping[str, Iterable[str]], untraced: Iterable[str]) -> dict[str, str]:
    """Give untraced tensors to the trap whose traced names share a prefix (strategy 3).

    A trap's prefix is what its names have in common, cut after the last part that is a number.

    Returns:
        Name -> label, for the names that match; the longest prefix wins.
    """
    prefixes = {
        label: prefix for label, names in traced.items() if (prefix := common_prefix(names))
    }
    found = {}
    for name in untraced:
        matching = [
            (len(prefix), label)
            for label, prefix in prefixes.items()
            if name == prefix or name.startswith(f"{prefix}.")
        ]
        if matching:
            found[name] = max(matching)[1]
    return found


def common_prefix(names: Iterable[str]) -> str:
    """Return the leading parts that all dotted names share, up to the last number among them."""
    parts = [name.split(".") for name in names]
    if not parts:
        return ""
    shared = []
    for column in zip(*parts, strict=False):
        if len(set(column)) != 1:
            break
        shared.append(column[0])
    numbers = [at for at, part in enumerate(shared) if part.isdigit()]
    return ".".join(shared[: numbers[-1] + 1]) if numbers else ""
