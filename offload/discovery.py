"""Which tensors belong to which trap (seed 003): ownership, observed modules, then names."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

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
        self._outside: dict[str, nn.Module] = {}
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

    @property
    def unattributable(self) -> set[int]:
        """Ids of the parameters that ran in several traps, or in one and outside of all."""
        traps: dict[int, set[str]] = {}
        for trap, modules in (*self._seen.items(), ("", self._outside)):
            for _, parameter in _own_parameters(modules):
                traps.setdefault(id(parameter), set()).add(trap)
        return {key for key, found in traps.items() if len(found) > 1 or "" in found}

    def parameters(self, allowed: Callable[[str], bool]) -> dict[str, list[str]]:
        """Return the names of each trap's parameters: those of its modules that may leave.

        One that ran in two traps, or in a trap and outside, is of none: it must stay.
        """
        several = self.unattributable
        return {
            trap: [
                name
                for name, parameter in _own_parameters(modules)
                if allowed(name) and id(parameter) not in several
            ]
            for trap, modules in self._seen.items()
        }

    def remove(self) -> None:
        """Take the hooks off."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _hook(self, name: str) -> Callable[[nn.Module, Any], None]:
        def hook(module: nn.Module, args: Any) -> None:
            place = self._seen[self._current[-1]] if self._current else self._outside
            place[name] = module

        return hook


def _own_parameters(modules: Mapping[str, nn.Module]) -> list[tuple[str, nn.Parameter]]:
    return [
        (f"{path}.{leaf}" if path else leaf, parameter)
        for path, module in modules.items()
        for leaf, parameter in module.named_parameters(recurse=False)
    ]


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


_SHY = (nn.MultiheadAttention, nn.TransformerEncoder, nn.TransformerEncoderLayer)


class OutsideReads(TorchFunctionMode):
    """Sees operations read tensors of units that are not in, and gives them device copies.

    A model may use a unit's weight without calling the unit, as with an embedding that serves as
    the output layer. Such a tensor has to stay on the device.

    Some modules of torch compute in another way, with other roundings, while any such mode is on.
    They run without it where their own weights are all in.

    Args:
        label_of: Id of a tensor -> label that brings it in.
        is_in: Whether a label is in.
        device: Where units compute.
        modules: Those of the model.

    Attributes:
        found: Ids of the tensors that were read so.
    """

    def __init__(
        self,
        label_of: Mapping[int, str],
        is_in: Callable[[str], bool],
        device: torch.device,
        modules: Iterable[nn.Module] = (),
    ) -> None:
        super().__init__()
        self._shy = [module for module in modules if isinstance(module, _SHY)]
        self._undo: list[Callable[[], object]] = []
        self._label_of = label_of
        self._is_in = is_in
        self._device = device
        self.found: set[int] = set()

    def __enter__(self) -> Self:
        """Begin to look."""
        for module in self._shy:
            self._let_alone(module)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        """Look no longer."""
        super().__exit__(*error)
        while self._undo:
            self._undo.pop()()

    def _let_alone(self, module: nn.Module) -> None:
        own, run = module.__dict__.get("forward"), module.forward
        labels = {self._label_of.get(id(parameter)) for parameter in module.parameters()} - {None}

        def forward(*args: Any, **kwargs: Any) -> Any:
            unit = module.__dict__.get("_ft_offload_name")  # its trap opens inside
            inside = all(label == unit or self._is_in(label) for label in labels if label)
            with torch._C.DisableTorchFunction() if inside else nullcontext():
                return run(*args, **kwargs)

        def undo() -> None:
            module.__dict__.pop("forward", None)
            if own is not None:
                module.__dict__["forward"] = own

        module.__dict__["forward"] = forward
        self._undo.append(undo)

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call the function; what gives no tensor (a shape, a dtype) reads no values."""
        away: dict[int, Tensor] = {}
        for leaf in tree_leaves((args, kwargs)):
            label = self._label_of.get(id(leaf)) if isinstance(leaf, Tensor) else None
            if label is not None and not self._is_in(label):
                away[id(leaf)] = leaf
        if not away:
            return func(*args, **(kwargs or {}))

        def swap(value: Any) -> Any:
            return value.to(self._device) if id(value) in away else value

        elsewhere = any(tensor.device.type != self._device.type for tensor in away.values())
        if elsewhere and getattr(func, "__name__", "") not in ("__get__", "__set__"):
            args, kwargs = tree_map(swap, args), tree_map(swap, kwargs or {})
        result = func(*args, **(kwargs or {}))
        if any(isinstance(leaf, Tensor) for leaf in tree_leaves(result)):
            self.found |= away.keys()
        return result
