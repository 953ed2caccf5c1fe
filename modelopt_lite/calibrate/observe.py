"""See, and where asked change, what enters every watched weight of a running model.

A torch function mode looks at each matrix product while the model's own forward code runs. It knows
the watched parameters by identity and follows them through indexing and views, so one mechanism
serves ``nn.Linear``, fused experts that index one expert after another, and batched products over
all experts, in every release of transformers and in remote code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from modelopt_lite.calibrate.products import OPERANDS

# Operations whose result still is the weight, or some of its experts.
_SAME_WEIGHT = frozenset(
    {
        *("t", "transpose", "permute", "swapaxes", "__get__"),  # __get__: .T, .mT, .data
        *("contiguous", "clone", "detach", "view", "reshape"),
        *("to", "type_as", "float", "half", "bfloat16"),
    }
)
_PARTS = frozenset({"__getitem__", "select", "unbind"})


@dataclass(frozen=True, slots=True)
class Site:
    """A place where inputs enter a weight: a parameter, and which expert of a stacked one.

    ``expert`` is None for a parameter that holds one matrix, and for a product over all experts.
    """

    entry: str
    expert: int | None = None


Visit = Callable[[Site, Tensor, bool], Tensor | None]
Amend = Callable[[Site, Tensor, Tensor, Tensor, bool], Tensor]


class InputWatch(TorchFunctionMode):
    """Calls ``visit(site, x, batched)`` before each product ``x @ weight`` of a watched parameter.

    ``x`` is ``[..., K]``; ``batched`` says that it is ``[E, ..., K]``, one slice per expert of a
    stacked parameter. What ``visit`` returns, unless None, takes the place of ``x``; then
    ``amend(site, x, changed, product, batched)``, where given, returns what takes the place of the
    product [..., R].
    """

    def __init__(self, visit: Visit, amend: Amend | None = None) -> None:
        super().__init__()
        self._visit = visit
        self._amend = amend
        self._watched = WeakTensorKeyDictionary()
        self._paused: set[str] = set()

    def twin(self, visit: Visit) -> InputWatch:
        """Return a watch of the same parameters that calls another function."""
        twin = InputWatch(visit)
        twin._watched, twin._paused = self._watched, self._paused
        return twin

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

    @contextmanager
    def pausing(self, entries: Iterable[str]) -> Iterator[None]:
        """Ignore products of these parameters meanwhile."""
        paused = set(entries) - self._paused
        self.pause(paused)
        try:
            yield
        finally:
            self.resume(paused)

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
        if name in OPERANDS:
            return self._product(func, name, args, kwargs)
        result = func(*args, **kwargs)
        if args and (name in _PARTS or name in _SAME_WEIGHT):
            self._follow(name, args, kwargs, result)
        return result

    def _site(self, value: Any) -> Site | None:
        site = self._watched.get(value) if isinstance(value, Tensor) else None
        return site if site is not None and site.entry not in self._paused else None

    def _product(
        self, func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        at, weight_at = OPERANDS[name]
        weight = args[weight_at] if len(args) > weight_at else kwargs.get("weight")
        site = self._site(weight)
        if site is None or weight is None:
            return func(*args, **kwargs)
        x = args[at] if len(args) > at else kwargs["input"]
        batched = weight.ndim == 3 and site.expert is None
        if batched:  # a product broadcasts x over the experts, and may have more axes before them
            x = x.expand(*x.shape[:-3], len(weight), *x.shape[-2:]).movedim(-3, 0)
        changed = self._visit(site, x, batched)
        if changed is None:
            return func(*args, **kwargs)
        given = changed.movedim(0, -3) if batched else changed
        if len(args) > at:
            args = (*args[:at], given, *args[at + 1 :])
        else:
            kwargs = {**kwargs, "input": given}
        product = func(*args, **kwargs)
        if self._amend is None:
            return product
        if not batched:
            return self._amend(site, x, changed, product, False)
        return self._amend(site, x, changed, product.movedim(-3, 0), True).movedim(0, -3)

    def _follow(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> None:
        """Watch what an operation made of a watched weight."""
        site = self._watched.get(args[0]) if isinstance(args[0], Tensor) else None
        if site is None:
            return
        if name not in _PARTS or site.expert is not None or args[0].ndim != 3:
            if isinstance(result, Tensor):
                self._watched[result] = site
            return
        for expert, part in _experts_of(name, args, kwargs, result):
            self._watched[part] = Site(site.entry, expert % len(args[0]))


def _experts_of(
    name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
) -> Iterator[tuple[int, Tensor]]:
    """Yield which expert each part of a stacked weight is; nothing where it is something else."""
    if name == "__getitem__":
        first, *rest = args[1] if isinstance(args[1], tuple) else (args[1],)
        if all(index == slice(None) or index is Ellipsis for index in rest):
            yield from _numbered(first, result)
        return
    axis = args[1] if len(args) > 1 else kwargs.get("dim", 0)
    if axis not in (0, -args[0].ndim):
        return
    if name == "unbind":
        yield from enumerate(result)
    else:
        yield from _numbered(args[2] if len(args) > 2 else kwargs.get("index"), result)


def _numbered(index: Any, result: Tensor) -> Iterator[tuple[int, Tensor]]:
    number = isinstance(index, int) or (isinstance(index, Tensor) and index.ndim == 0)
    if number and not isinstance(index, bool):
        yield int(index), result


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
