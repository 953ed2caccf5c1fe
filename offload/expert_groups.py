"""Run a block's fused experts group by group, with the bits of the whole block.

transformers 5 keeps the experts of a block in a few tensors with an axis of experts, and its eager
forward runs them one after another in ascending order, adding each one's rows to one sum. Here the
same forward runs once for each expert that a token chose: with that expert's slices for parameters,
its tokens for input, and their routing. Each product then has the operands that it has in the
whole block, and the rows are added in the same order and the same dtype, so the sum has the same
bits, and only the slices of one group of experts need to be on the device.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from modelopt_lite.errors import OffloadError

# Group -> context with name -> its slices [experts of the group, ...], in the order of the group.
BringIn = Callable[[Sequence[int]], AbstractContextManager[Mapping[str, Tensor]]]


def sliced_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters of an experts module that have an axis of experts, by name.

    Raises:
        OffloadError: It is no module of fused experts whose forward takes (hidden states [T, H],
            experts of each token [T, K], their weights [T, K]).
    """
    count = getattr(module, "num_experts", None)
    found = {
        name: parameter
        for name, parameter in module.named_parameters(recurse=False)
        if parameter.ndim > 1 and parameter.shape[0] == count
    }
    takes = len(inspect.signature(_eager(module)).parameters) - 1
    if not any(p.ndim == 3 for p in found.values()) or takes != 3:
        raise OffloadError(
            f"{type(module).__name__} cannot be run in groups: it needs num_experts, parameters "
            "[experts, ., .], and a forward of hidden states, experts and weights of each token"
        )
    return found


@contextmanager
def grouped_experts(
    module: nn.Module, groups: Sequence[Sequence[int]], bring_in: BringIn
) -> Iterator[None]:
    """Let an experts module run in groups while inside of this context.

    Args:
        module: Fused experts as transformers has them. Its parameters in `sliced_parameters` are
            not read, and have their own values again afterwards.
        groups: Indices of experts; all of them, each once, ascending within and across groups.
        bring_in: Has a group's slices on the device while its context is open. It is called in
            turn for the groups that a token chose an expert of, and not at all for others.

    Raises:
        OffloadError: The module cannot be run in groups.
        ValueError: The groups are not all experts in ascending order.
    """
    parameters = sliced_parameters(module)
    count = int(module.num_experts)  # type: ignore[arg-type]
    if [expert for group in groups for expert in group] != list(range(count)):
        raise ValueError(
            f"groups {[list(g) for g in groups]} must be the experts 0 to {count - 1} in turn: "
            "another order of summing gives other bits"
        )
    eager = _eager(module)

    def forward(hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        total: Tensor | None = None
        hit = set(chosen.unique().tolist())
        for group in groups:
            if hit.isdisjoint(group):
                continue
            with bring_in(group) as slices:
                for at, expert in enumerate(group):
                    if expert in hit:
                        # Ordered by slot, then by token, as the eager forward has them.
                        slot, token = chosen.T.eq(expert).nonzero(as_tuple=True)
                        _bind(parameters, slices, at)
                        with _RowsAdded(type(module).__name__) as added:
                            part = eager(
                                module,
                                hidden[token],
                                torch.zeros_like(token).unsqueeze(1),
                                weights[token, slot].unsqueeze(1),
                            )
                        rows = added.rows_of(part)
                        if total is None:
                            total = rows.new_zeros(hidden.shape)
                        total.index_add_(0, token, rows)
        return torch.zeros_like(hidden) if total is None else total.to(hidden.dtype)

    with _taken_over(module, parameters, forward):
        yield


class _RowsAdded(TorchFunctionMode):
    """Sees what a forward adds to its sum, which may be wider than what it returns."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name
        self._rows: list[Tensor] = []

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func is Tensor.index_add_:
            self._rows.append(args[3])
        return func(*args, **(kwargs or {}))

    def rows_of(self, result: Tensor) -> Tensor:
        """Return the rows, given what was returned."""
        if len(self._rows) == 1:
            [rows] = self._rows
            if torch.isclose(rows.to(result.dtype), result, rtol=0, atol=0, equal_nan=True).all():
                return rows
        raise OffloadError(
            f"{self._name} cannot be run in groups: its forward does more than to add up the rows "
            "of its experts"
        )


@contextmanager
def _taken_over(
    module: Any, parameters: Mapping[str, nn.Parameter], forward: Callable[..., Tensor]
) -> Iterator[None]:
    """Give a module a forward; while it runs, the module is one of a single expert."""
    values = {name: parameter.data for name, parameter in parameters.items()}
    count, before = module.num_experts, module.__dict__.get("forward")

    def single(hidden: Tensor, *routing: Tensor, **named: Tensor) -> Tensor:
        module.num_experts = 1
        try:
            return forward(hidden, *routing, *named.values())
        finally:
            module.num_experts = count
            for name, parameter in parameters.items():
                parameter.data = values[name]

    module.forward = single
    try:
        yield
    finally:
        del module.forward
        if before is not None:
            module.forward = before


def _bind(parameters: Mapping[str, nn.Parameter], slices: Mapping[str, Tensor], at: int) -> None:
    for name, parameter in parameters.items():
        parameter.data = slices[name][at : at + 1]


def _eager(module: nn.Module) -> Callable[..., Tensor]:
    """Return the forward that the class has, without transformers' choice among backends."""
    found: Callable[..., Tensor] = inspect.unwrap(type(module).forward)
    return found
