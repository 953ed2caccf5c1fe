"""Experts that are modules of their own, called one after another by the code of their block.

A block wants each expert's product before it calls the next one, and the experts lie on several
ranks. So its code runs twice: the first time its experts only note what enters them; then all rows
go to their ranks at once; the second time each expert answers with what came back. What a router
chooses depends on nothing but its inputs, so that both runs are alike.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from modelopt_lite.dense_experts import by_expert
from modelopt_lite.errors import SpecError

Products = Callable[[dict[int, Tensor]], Tensor]
_ALONE = "run the model in one process, or give ep=1 (--ep 1)"


class _Listed:
    """A block and its experts, of which one pass at a time runs; see `listed_forwards`."""

    def __init__(
        self,
        path: str,
        block: nn.Module,
        experts: nn.ModuleList,
        products: Products,
        unseen: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._path, self._block, self._experts = path, block, experts
        self._products, self._unseen = products, unseen
        self._noted: dict[int, Tensor] | None = None
        self._answers: dict[int, Tensor] | None = None

    def forwards(self) -> dict[nn.Module, Callable[..., Any]]:
        answers = {e: partial(self._answer, number) for number, e in enumerate(self._experts)}
        return {self._block: self._run, **answers}

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        own = type(self._block).forward
        noting: dict[int, Tensor] = {}
        self._noted = noting
        with self._unseen():
            own(self._block, *args, **kwargs)
        self._noted = None
        noted = dict(sorted(noting.items()))
        if not noted:
            raise self._refusal("are not called as modules by their block")
        found = self._products(noted)  # other passes run meanwhile
        pieces = found.split([len(rows_SH) for rows_SH in noted.values()])
        self._answers = dict(zip(noted, pieces, strict=True))
        result = own(self._block, *args, **kwargs)
        self._answers = None
        return result

    def _answer(self, number: int, *args: Any, **kwargs: Any) -> Tensor:
        if self._answers is not None:
            return self._answers.pop(number)
        if self._noted is None:
            raise self._refusal(
                "are called outside of their block's own code (as moe_calibrate_all_experts does)"
            )
        given = (*args, *kwargs.values())
        if len(given) != 1 or not isinstance(given[0], Tensor) or given[0].ndim != 2:
            raise self._refusal("take more than rows of tokens")
        if number in self._noted:
            raise self._refusal("are called more than once for a batch")
        self._noted[number] = given[0]
        return torch.zeros_like(given[0])

    def _refusal(self, why: str) -> SpecError:
        kind = type(self._experts[0]).__name__
        return SpecError(
            f"the experts {self._path!r} ({kind}) {why}, so that their rows cannot be sent to "
            f"other ranks; {_ALONE}"
        )


def listed_forwards(
    path: str,
    block: nn.Module,
    experts: nn.ModuleList,
    products: Products,
    unseen: Callable[[], AbstractContextManager[None]],
) -> dict[nn.Module, Callable[..., Any]]:
    """Return what a block and each of its experts run in the place of their own forward.

    Args:
        path: Name of the list, for messages.
        block: The module that calls its experts.
        experts: The list.
        products: Takes the rows of each expert, [S, H], and returns the products of all, expert by
            expert.
        unseen: Makes a context in which nobody looks at what enters weights.

    Their calls raise:
        SpecError: The block does not call its experts as modules, with rows of tokens, once each.
    """
    return _Listed(path, block, experts, products, unseen).forwards()


def listed_products(experts: nn.ModuleList, rows_SH: Tensor, expert_S: Tensor) -> Tensor:
    """Return the product of each row with its expert, [S, H], in the experts' own code.

    Args:
        experts: The list, of which those asked for are in memory.
        rows_SH: One expert's rows after another's.
        expert_S: The expert of each.
    """

    def product(number: int, x_NH: Tensor) -> Tensor:
        found: Tensor = type(experts[number]).forward(experts[number], x_NH)
        return found

    return by_expert(product, rows_SH, expert_S)
