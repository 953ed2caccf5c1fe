"""Experts that all see every token: each runs by itself, wherever it lies.

Their container takes the rows of all experts, in a row, and multiplies the whole stack at once
(Llama 4: a token's row is zero for experts that it was not sent to). A product over all of a stack
may round otherwise than one over a part of it, so that ranks that share the experts would not give
the bytes of one process. Run one by one, they do.

Shape suffixes: E experts, N tokens, S rows (E * N, by expert), H hidden size.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable

import torch
from torch import Tensor, nn


def is_dense(module: nn.Module) -> bool:
    """Whether a container of experts takes the rows of all of them, [S, H], and nothing else."""
    stacks = module._parameters
    alike = {p.shape[0] if p is not None and p.ndim == 3 else None for p in stacks.values()}
    if "down_proj" not in stacks or len(alike) != 1 or None in alike:
        return False
    return len(inspect.signature(type(module).forward).parameters) == 2  # self, and the rows


def hidden_size(module: nn.Module) -> int:
    """Return the width of the rows of a dense container, whose stacks are [E, in, out]."""
    return int(module.get_parameter("down_proj").shape[2])


def one_by_one(module: nn.Module) -> Callable[[Tensor], Tensor]:
    """Return a forward of a dense container that runs one expert after another."""
    count = len(module.get_parameter("down_proj"))

    def forward(rows_SH: Tensor) -> Tensor:
        numbers = torch.arange(count).repeat_interleave(len(rows_SH) // count)
        return dense_products(module, rows_SH, numbers)

    return forward


def dense_products(module: nn.Module, rows_SH: Tensor, expert_S: Tensor) -> Tensor:
    """Return the product of each row with its expert, [S, H], in the class's own code.

    Args:
        module: A dense container.
        rows_SH: Rows of some of its experts, one expert's after another's.
        expert_S: The expert of each.
    """
    forward = type(module).forward
    return by_expert(lambda number, x_NH: forward(_alone(module, number), x_NH), rows_SH, expert_S)


def by_expert(
    product: Callable[[int, Tensor], Tensor], rows_SH: Tensor, expert_S: Tensor
) -> Tensor:
    """Return the products [S, H] of rows that lie one expert's after another's.

    Args:
        product: Takes an expert's number and its rows [N, H].
        rows_SH: The rows.
        expert_S: The expert of each.
    """
    numbers, counts = torch.unique_consecutive(expert_S, return_counts=True)
    pieces = rows_SH.split(counts.tolist())
    found = [product(*one) for one in zip(numbers.tolist(), pieces, strict=True)]
    return torch.cat([rows_SH[:0], *found])


def _alone(module: nn.Module, expert: int) -> nn.Module:
    """Return a container of one expert, which shares its memory."""
    shell = module.__class__.__new__(module.__class__)
    # A view, which whoever watches the weight can follow.
    own = {n: p[expert].view(1, *p.shape[1:]) for n, p in module.named_parameters(recurse=False)}
    shell.__dict__ = {**module.__dict__, "_parameters": own}
    return shell
