"""Blocks that call experts which are modules of their own: twice for a batch, and seen once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn

from modelopt_lite.errors import SpecError
from modelopt_lite.offload.forwards import running
from modelopt_lite.parallel.lists import listed_forwards, listed_products

Body = Callable[["Block", Tensor], Tensor]


class Block(nn.Module):
    """Sends rows with a positive first channel to the first expert, the others to the second."""

    def __init__(self, body: Body | None = None) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        if self.body is not None:
            return self.body(self, x)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            at = (x[:, 0] > 0) == (number == 0)
            out[at] = expert(x[at]) * 2
        return out


class Ranks:
    """Multiplies what a block sends, and counts the runs that nobody saw."""

    def __init__(self, block: Block) -> None:
        self.block = block
        self.unseen = 0

    def products(self, noted: dict[int, Tensor]) -> Tensor:
        numbers = [torch.full((len(rows),), number) for number, rows in noted.items()]
        return listed_products(self.block.experts, torch.cat([*noted.values()]), torch.cat(numbers))

    @contextmanager
    def nobody_looks(self) -> Iterator[None]:
        self.unseen += 1
        yield

    def forwards(self) -> dict[nn.Module, Callable[..., Tensor]]:
        experts = self.block.experts
        return listed_forwards("experts", self.block, experts, self.products, self.nobody_looks)


def test_what_comes_back_is_what_experts_would_have_given() -> None:
    block, x = Block(), torch.randn(6, 4)
    expected = block(x)
    ranks = Ranks(block)
    with running(ranks.forwards()):
        assert torch.equal(block(x), expected)
        assert torch.equal(block(-x), block(-x))
    assert ranks.unseen == 3
    assert torch.equal(block(x), expected)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (lambda block, x: x @ block.experts[0].weight, "are not called as modules"),
        (lambda block, x: block.experts[0](x[None]), "take more than rows of tokens"),
        (lambda block, x: block.experts[0](x) + block.experts[0](x), "more than once for a batch"),
    ],
)
def test_other_blocks_are_refused(body: Body, words: str) -> None:
    block = Block(body)
    with running(Ranks(block).forwards()):
        with pytest.raises(SpecError, match=rf"'experts' \(Linear\).*{words}.*--ep 1"):
            block(torch.randn(3, 4))


def test_experts_are_not_called_from_elsewhere() -> None:
    block = Block()
    with running(Ranks(block).forwards()):
        with pytest.raises(SpecError, match="moe_calibrate_all_experts"):
            block.experts[0](torch.randn(3, 4))
