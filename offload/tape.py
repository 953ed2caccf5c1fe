"""Gradients of a model that is in memory a layer at a time.

In the forward pass a layer runs without autograd, and what entered it is put away. What it returns
stands in the model's graph as the output of a function whose backward only takes note of the
gradient. Then layers are visited once more, from the last to the first: each runs again on what had
entered it, with autograd, and passes the gradient of its outputs on to whatever made its inputs.
The model's own code between layers stays in the graph. So the result is that of ordinary autograd,
every layer's weights are read twice, and memory holds the graph of one layer for one pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from modelopt_lite.offload.forwards import running
from modelopt_lite.offload.shelf import Kept, Shelf


@dataclass(slots=True, eq=False)
class Call:
    """One call of a layer in one pass.

    Attributes:
        layer: The layer's name.
        index: The pass.
        number: How many calls the pass had made before.
        values: What entered, flat; a `Kept` where it was put away.
        structure: How ``values`` were arranged.
        origins: Position in ``values`` -> what made it: the output of a call, or a tensor of the
            graph between layers. Where there is none, no gradient is passed on.
        gradients: Output -> its gradient so far.
    """

    layer: str
    index: int
    number: int
    values: list[Any]
    structure: TreeSpec
    origins: dict[int, tuple[Call, int] | Tensor] = field(default_factory=dict)
    gradients: dict[int, Kept] = field(default_factory=dict)


class ReachedError(Exception):
    """A pass has come to where it shall end."""


class Tape:
    """Takes note of calls of layers, and goes back through them.

    Args:
        shelf: Where inputs and gradients are put away.
        ends: Pass -> how many calls of layers it may make; the next one raises `ReachedError`.
            None: any number.

    Attributes:
        visits: The calls, by visits to layers: a visit is begun with `begin`.
    """

    def __init__(self, shelf: Shelf, ends: Mapping[int, int] | None = None) -> None:
        self._shelf = shelf
        self._ends = ends
        self._made: dict[int, int] = {}
        self._anchor = torch.zeros((), requires_grad=True)
        self.visits: list[list[Call]] = []

    def begin(self) -> None:
        """Begin a visit to a layer."""
        self.visits.append([])

    def has_ended(self, index: int) -> bool:
        """Whether a pass may make no more calls."""
        return self._ends is not None and self._made.get(index, 0) >= self._ends.get(index, 0)

    def gradients(self, call: Call) -> Iterator[tuple[int, Tensor]]:
        """Yield the outputs of a call that have gradients so far, and these, on the host."""
        for at, kept in call.gradients.items():
            yield at, self._shelf.look(kept)

    def around(
        self, layers: Mapping[str, nn.Module], current: Callable[[], int]
    ) -> AbstractContextManager[None]:
        """Have layers run without autograd, and take note of their calls.

        Args:
            layers: The layers, by name.
            current: Returns which pass is running.
        """
        return running({m: self._noted(name, m.forward, current) for name, m in layers.items()})

    def back(self, call: Call, forward: Callable[..., Any]) -> None:
        """Run a call again with autograd, and pass the gradients of its outputs on.

        Calls must come in the reverse of the order in which they ran.

        Args:
            call: The call; it is empty afterwards.
            forward: The layer's own, with its weights in memory.
        """
        gradients = {at: self._shelf.take(kept) for at, kept in call.gradients.items()}
        values = [self._shelf.take(v) if isinstance(v, Kept) else v for v in call.values]
        leaves = {at: values[at].requires_grad_() for at in _floating(values) & call.origins.keys()}
        if not leaves:  # the first layer: its matrices have gradients, though nothing before has
            first = min(_floating(values), default=None)
            leaves = {} if first is None else {first: values[first].requires_grad_()}
        if gradients:
            with torch.enable_grad():
                for at, leaf in leaves.items():
                    values[at] = leaf.clone()  # a layer may change what enters it in place
                args, kwargs = tree_unflatten(values, call.structure)
                outputs, _ = tree_flatten(forward(*args, **kwargs))
            used = [at for at in gradients if outputs[at].requires_grad]
            if used:
                torch.autograd.backward(
                    [outputs[at] for at in used], [gradients[at] for at in used]
                )
        for at, origin in call.origins.items():
            if (gradient := leaves[at].grad) is None:
                continue
            if isinstance(origin, Tensor):
                torch.autograd.backward([origin], [gradient], retain_graph=True)
            else:
                self.add(*origin, gradient)
        call.values, call.origins, call.gradients = [], {}, {}

    def _noted(
        self, name: str, forward: Callable[..., Any], current: Callable[[], int]
    ) -> Callable[..., Any]:
        @wraps(forward)
        def run(*args: Any, **kwargs: Any) -> Any:
            if self.has_ended(current()):
                raise ReachedError
            call = self._record(name, current(), args, kwargs)
            with torch.no_grad():
                output = forward(*args, **kwargs)
            return self._bound(call, output)

        return run

    def _record(self, name: str, index: int, args: Any, kwargs: Any) -> Call:
        values, structure = tree_flatten((args, kwargs))
        number = self._made[index] = self._made.get(index, 0) + 1
        call = Call(name, index, number - 1, values, structure)
        first = min((at for at, v in enumerate(values) if isinstance(v, Tensor)), default=None)
        for at in _floating(values):
            value = values[at]
            if value.requires_grad:
                node = value.grad_fn
                made_by = getattr(node, "call", None)
                call.origins[at] = (made_by, node.places[value.output_nr]) if made_by else value
            if value.requires_grad or at == first:  # others may belong to several calls
                values[at] = self._shelf.put(value)
        self.visits[-1].append(call)
        return call

    def _bound(self, call: Call, output: Any) -> Any:
        """Return what a call returned, each tensor as an output of `_Boundary`."""
        values, structure = tree_flatten(output)
        places = sorted(_floating(values))
        bound = _Boundary.apply(call, self.add, places, self._anchor, *(values[p] for p in places))
        for place, value in zip(places, bound, strict=True):
            values[place] = value
        return tree_unflatten(values, structure)

    def add(self, call: Call, at: int, gradient: Tensor) -> None:
        """Add to the gradient of an output of a call."""
        before = call.gradients.get(at)
        total = gradient if before is None else self._shelf.take(before) + gradient
        call.gradients[at] = self._shelf.put(total)


class _Boundary(torch.autograd.Function):
    """Gives its tensors back unchanged; its backward takes note of their gradients, and ends."""

    @staticmethod
    def forward(
        ctx: Any,
        call: Call,
        add: Callable[[Call, int, Tensor], None],
        places: list[int],
        anchor: Tensor,
        *values: Tensor,
    ) -> tuple[Tensor, ...]:
        """Return the values."""
        ctx.set_materialize_grads(False)
        ctx.call, ctx.add, ctx.places = call, add, places
        return tuple(value.detach() for value in values)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, ...]:
        """Take note of the gradients."""
        for place, gradient in zip(ctx.places, gradients, strict=True):
            if gradient is not None:
                ctx.add(ctx.call, place, gradient)
        return (None,) * (4 + len(gradients))


def _floating(values: list[Any]) -> set[int]:
    """Positions of tensors of floating-point numbers."""
    return {at for at, v in enumerate(values) if isinstance(v, Tensor) and v.is_floating_point()}
