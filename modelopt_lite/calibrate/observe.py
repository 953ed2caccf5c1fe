"""See, and where asked change, what enters every watched weight of a running model.

A torch function mode looks at each matrix product while the model's own forward code runs. It knows
the watched parameters by identity and follows them through indexing and views, so one mechanism
serves ``nn.Linear``, fused experts that index one expert after another, and batched products over
all experts, in every release of transformers and in remote code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

# Position of (input, weight) among the arguments of every product that may hold a weight.
_PRODUCTS: dict[str, tuple[int, int]] = {
    "linear": (0, 1),
    "matmul": (0, 1),
    "__matmul__": (0, 1),
    "bmm": (0, 1),
    "mm": (0, 1),
    "addmm": (1, 2),
    "baddbmm": (1, 2),
}
# Operations whose result still is the weight, or some of its experts.
_SAME_WEIGHT = frozenset(
    {"t", "transpose", "permute", "contiguous", "to", "view", "reshape", "__get__", "swapaxes"}
)
_SELECT = frozenset({"__getitem__", "select"})


@dataclass(frozen=True, slots=True)
class Site:
    """A place where inputs enter a weight: a parameter, and which expert of a stacked one.

    ``expert`` is None for a parameter that holds one matrix, and for a product over all experts.
    """

    entry: str
    expert: int | None = None


Visit = Callable[[Site, Tensor, bool], Tensor | None]


class InputWatch(TorchFunctionMode):
    """Calls ``visit(site, x, batched)`` before each product ``x @ weight`` of a watched parameter.

    ``x`` is ``[..., K]``; ``batched`` says that it is ``[E, ..., K]``, one slice per expert of a
    stacked parameter. What ``visit`` returns, unless None, takes the place of ``x``.
    """

    def __init__(self, visit: Visit) -> None:
        super().__init__()
        self._visit = visit
        self._watched = WeakTensorKeyDictionary()
        self._paused: set[str] = set()

    def watch(self, parameters: Mapping[str, Tensor]) -> None:
        """Start to watch parameters; those watched before are forgotten when they are freed."""
        for entry, parameter in parameters.items():
            self._watched[parameter] = Site(entry)

    def pause(self, entries: Iterable[str]) -> None:
        """Ignore products of these parameters until `resume`."""
        self._paused.update(entries)

    def resume(self, entries: Iterable[str]) -> None:
        """Undo `pause`."""
        self._paused.difference_update(entries)

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Look at one torch function call."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in _PRODUCTS:
            args, kwargs = self._product(name, args, kwargs)
            return func(*args, **kwargs)
        result = func(*args, **kwargs)
        if args and (name in _SELECT or name in _SAME_WEIGHT or name == "unbind"):
            self._follow(name, args, kwargs, result)
        return result

    def _site(self, value: Any) -> Site | None:
        site = self._watched.get(value) if isinstance(value, Tensor) else None
        return site if site is not None and site.entry not in self._paused else None

    def _product(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        at, weight_at = _PRODUCTS[name]
        weight = args[weight_at] if len(args) > weight_at else kwargs.get("weight")
        site = self._site(weight)
        if site is None or weight is None:
            return args, kwargs
        x = args[at] if len(args) > at else kwargs["input"]
        changed = self._visit(site, x, weight.ndim == 3 and site.expert is None)
        if changed is None:
            return args, kwargs
        if len(args) > at:
            return (*args[:at], changed, *args[at + 1 :]), kwargs
        return args, {**kwargs, "input": changed}

    def _follow(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> None:
        """Watch what an operation made of a watched weight."""
        site = self._watched.get(args[0]) if isinstance(args[0], Tensor) else None
        if site is None:
            return
        if name == "unbind":
            for expert, part in enumerate(result):
                self._watched[part] = Site(site.entry, expert)
        elif not isinstance(result, Tensor):
            return
        elif name in _SELECT and site.expert is None and args[0].ndim == 3:
            index = args[1] if name == "__getitem__" else args[2]
            if isinstance(index, int) or (isinstance(index, Tensor) and index.ndim == 0):
                self._watched[result] = Site(site.entry, int(index))
        else:
            self._watched[result] = site


@dataclass(slots=True)
class InputStats:
    """What entered each site: the largest magnitude, and how many rows (tokens).

    ``amax[site]`` is a 0-d tensor in the dtype of the input.
    """

    amax: dict[Site, Tensor] = field(default_factory=dict)
    rows: dict[Site, int] = field(default_factory=dict)

    def visit(self, site: Site, x: Tensor, batched: bool) -> None:
        """Take one input into account; an `InputWatch` calls it."""
        if batched:
            for expert, x_expert in enumerate(x.unbind(0)):
                self.visit(Site(site.entry, expert), x_expert, False)
            return
        count = x.numel() // x.shape[-1] if x.shape[-1] else 0
        self.rows[site] = self.rows.get(site, 0) + count
        if not count:
            return
        low, high = torch.aminmax(x.detach())
        amax = torch.maximum(-low, high)
        before = self.amax.get(site)
        self.amax[site] = amax if before is None else torch.maximum(before, amax)
