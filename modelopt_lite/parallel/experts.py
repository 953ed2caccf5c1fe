"""Send the rows of an MoE layer to the ranks of their experts, and bring the products back.

The products are those of one process, bit for bit: an expert multiplies the rows that one batch has
for it, in the order that the model's own forward has them, in that forward's own code. They come
back unsummed, and are weighted and summed at home as that forward does it, expert by expert.

Shape suffixes: N tokens of a batch, S rows (a token once for each of its experts), H hidden size.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from modelopt_lite.dense_experts import dense_products, hidden_size, is_dense, one_by_one
from modelopt_lite.errors import SpecError
from modelopt_lite.offload.forwards import running
from modelopt_lite.parallel.degrees import Degrees
from modelopt_lite.parallel.lists import listed_forwards, listed_products
from modelopt_lite.parallel.team import Team

_NAME = "modelopt_lite_ranks"


@dataclass(slots=True)
class Routed:
    """One call of a layer's experts: the rows of each expert, in a row.

    Attributes:
        hidden: What enters the experts, [N, H].
        tokens: [S], the token of each row: by expert, and of one in the model's own order.
        weights: The routing weight of each row, [S, 1].
        counts: Rows of each expert.
    """

    hidden: Tensor
    tokens: Tensor
    weights: Tensor
    counts: Tensor

    @classmethod
    def of(cls, hidden_NH: Tensor, index_NK: Tensor, weight_NK: Tensor, experts: int) -> Routed:
        """Sort what a router chose.

        The model's own forward takes, of one expert, first those tokens whose first choice it is.
        """
        expert_S = index_NK.T.reshape(-1)
        order_S = torch.argsort(expert_S, stable=True)
        return cls(
            hidden_NH,
            order_S % len(hidden_NH),
            weight_NK.T.reshape(-1)[order_S].unsqueeze(1),
            torch.bincount(expert_S, minlength=experts),
        )

    @classmethod
    def sorted(cls, rows_SH: Tensor, counts: Tensor) -> Routed:
        """Take rows that lie expert by expert, each a token of its own."""
        tokens_S = torch.arange(len(rows_SH), device=rows_SH.device)
        return cls(rows_SH, tokens_S, rows_SH.new_ones(len(rows_SH), 1), counts)

    def rows(self, experts: range) -> Tensor:
        """Return the rows of some experts, [S, H]."""
        start = int(self.counts[: experts.start].sum())
        stop = start + int(self.counts[experts.start : experts.stop].sum())
        return self.hidden[self.tokens[start:stop]]

    def combined(self, products_SH: Tensor) -> Tensor:
        """Weight the products and sum them, [N, H]."""
        sum_NH = torch.zeros_like(self.hidden)
        start = 0
        for count in self.counts.tolist():
            own = slice(start, start + count)
            start += count
            if count:
                weighted_SH = products_SH[own] * self.weights[own]
                sum_NH.index_add_(0, self.tokens[own], weighted_SH.to(sum_NH.dtype))
        return sum_NH


Post = Callable[[nn.Module, Routed], Tensor]
Unseen = Callable[[str], AbstractContextManager[None]]


def expert_forward(module: nn.Module) -> Callable[..., Tensor]:
    """Return the forward of a container of experts that the model's file has: one by one."""
    own: Callable[..., Tensor] = inspect.unwrap(type(module).forward)
    return partial(own, module)


def expert_products(module: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
    """Return what takes rows [S, H], by expert, and their experts [S] and returns their products.

    They are unweighted, and come from the container's own code.
    """
    if isinstance(module, nn.ModuleList):
        return partial(listed_products, module)
    if is_dense(module):
        return partial(dense_products, module)
    return partial(products, expert_forward(module))


@contextmanager
def sent_experts(
    model: Any, containers: Sequence[str], post: Post, unseen: Unseen
) -> Iterator[None]:
    """Have containers of experts hand what enters them to ``post``, which gives the products.

    Args:
        model: The model.
        containers: Names of its modules.
        post: Takes a container and its rows, and returns a product for each row.
        unseen: Makes, of a block's name, a context in which nobody looks at what enters weights.

    Raises:
        SpecError: A container takes no forward from outside, or does not sum as is known here.
    """
    forwards: dict[nn.Module, Callable[..., Any]] = {}
    routed: list[nn.Module] = []
    for path in containers:
        module = model.get_submodule(path)
        if isinstance(module, nn.ModuleList):
            block = path.rpartition(".")[0]
            send = partial(_send_listed, post, module)
            forwards |= listed_forwards(
                path, model.get_submodule(block), module, send, partial(unseen, block)
            )
            continue
        check_container(path, module)
        if is_dense(module):
            forwards[module] = partial(_send_dense, post, module)
        else:
            routed.append(module)
    with running(forwards), _in_interface(routed, post):
        yield


@contextmanager
def _in_interface(containers: Sequence[Any], post: Post) -> Iterator[None]:
    """Have containers that take their forward from transformers' interface take this one."""
    if not containers:
        yield
        return
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    counts = {
        id(m): next(len(p) for p in m._parameters.values() if p.ndim == 3) for m in containers
    }

    def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
        hidden_NH, index_NK, weight_NK = (*args, *kwargs.values())
        routed = Routed.of(hidden_NH, index_NK, weight_NK, counts[id(module)])
        return routed.combined(post(module, routed))

    configs = {id(m.config): m.config for m in containers}
    before = {key: config._experts_implementation for key, config in configs.items()}
    ALL_EXPERTS_FUNCTIONS[_NAME] = forward
    for config in configs.values():
        config._experts_implementation = _NAME
    try:
        yield
    finally:
        for key, config in configs.items():
            config._experts_implementation = before[key]
        del ALL_EXPERTS_FUNCTIONS[_NAME]


def _send_dense(post: Post, module: nn.Module, rows_SH: Tensor) -> Tensor:
    count = len(module.get_parameter("down_proj"))
    counts = torch.full((count,), len(rows_SH) // count)
    return post(module, Routed.sorted(rows_SH, counts))


def _send_listed(post: Post, experts: nn.ModuleList, noted: dict[int, Tensor]) -> Tensor:
    counts = torch.zeros(len(experts), dtype=torch.int64)
    for number, rows_SH in noted.items():
        counts[number] = len(rows_SH)
    return post(experts, Routed.sorted(torch.cat([*noted.values()]), counts))


def check_container(path: str, module: nn.Module) -> None:
    """Refuse experts that cannot be sent, or whose own forward sums in another way than here.

    The forward of the class runs on a few rows, with weights that are one row repeated.

    Raises:
        SpecError: It names the class.
    """
    kind = type(module).__name__
    if is_dense(module):
        _check_dense(path, module)
        return
    if not hasattr(getattr(module, "config", None), "_experts_implementation"):
        raise SpecError(
            f"the experts {path!r} ({kind}) take no forward from outside, so that tokens cannot be "
            "sent to other ranks; run the model in one process, or give ep=1 (--ep 1)"
        )
    shell, hidden = _shell(module)
    count = len(next(iter(shell.parameters())))
    few = min(count, 4)
    generator = torch.Generator().manual_seed(0)
    hidden_NH = torch.randn(5, hidden, generator=generator).to(next(shell.parameters()).dtype)
    index_NK = torch.stack([torch.randperm(few, generator=generator)[:2] for _ in range(5)])
    weight_NK = torch.rand(index_NK.shape, generator=generator).to(hidden_NH.dtype)
    own = expert_forward(shell)
    routed = Routed.of(hidden_NH, index_NK, weight_NK, count)
    if not torch.equal(own(hidden_NH, index_NK, weight_NK), routed.combined(_alone(own, routed))):
        raise SpecError(
            f"the experts {path!r} ({kind}) weight or sum their products in a way of their own, so "
            "that several ranks would not give the bytes of one; run the model in one process, or "
            "give ep=1 (--ep 1)"
        )


def _check_dense(path: str, module: nn.Module) -> None:
    """Refuse a container that does not divide its rows among its experts as is known here.

    Both ways run; they may round differently.
    """
    shell, hidden = _shell(module, 2)
    rows_SH = torch.randn(6, hidden, generator=torch.Generator().manual_seed(0))
    rows_SH = rows_SH.to(next(shell.parameters()).dtype)
    try:
        own = type(module).forward(shell, rows_SH).float()
    except RuntimeError:  # other shapes
        own = torch.empty(0)
    known = one_by_one(shell)(rows_SH).float() if own.shape == rows_SH.shape else own + torch.inf
    if not torch.allclose(own, known, rtol=0.05, atol=0.05 * float(known.abs().mean())):
        raise SpecError(
            f"the experts {path!r} ({type(module).__name__}) divide what enters them in a way of "
            "their own; run the model in one process, or give ep=1 (--ep 1)"
        )


def products(own: Callable[..., Tensor], rows_SH: Tensor, expert_S: Tensor) -> Tensor:
    """Return the product of each row with its expert, [S, H], unweighted."""
    ones_S1 = torch.ones(len(rows_SH), 1, dtype=rows_SH.dtype, device=rows_SH.device)
    return own(rows_SH, expert_S.unsqueeze(1), ones_S1)


def _alone(own: Callable[..., Tensor], routed: Routed) -> Tensor:
    experts = torch.arange(len(routed.counts), device=routed.counts.device)
    rows_SH = routed.rows(range(len(experts)))
    return products(own, rows_SH, experts.repeat_interleave(routed.counts))


def _shell(module: nn.Module, most: int | None = None) -> tuple[nn.Module, int]:
    """A copy of a container with parameters that take no memory, and its hidden size.

    It has at most so many experts.
    """
    shell = module.__class__.__new__(module.__class__)
    shell.__dict__ = {**module.__dict__, "_parameters": {}}
    generator = torch.Generator().manual_seed(1)
    for name, parameter in module.named_parameters(recurse=False):
        count = min(len(parameter), most or len(parameter))
        row = torch.randn(count, *parameter.shape[-1:], generator=generator)
        row = (row / parameter.shape[-1] ** 0.5).to(parameter.dtype)
        full = row.view(len(row), *[1] * (parameter.ndim - 2), row.shape[-1])
        shell.register_parameter(
            name, nn.Parameter(full.expand(count, *parameter.shape[1:]), False)
        )
    if is_dense(module):
        return shell, hidden_size(module)
    down = shell.get_parameter("down_proj")
    return shell, int(down.shape[-1] if getattr(module, "is_transposed", False) else down.shape[-2])


@dataclass(slots=True)
class Arrived:
    """What one batch has for experts of this rank.

    Attributes:
        batch: The batch.
        counts: Rows of each expert of this rank.
        rows: The rows, [S, H].
        products: A product for each, to be filled.
    """

    batch: int
    counts: Tensor
    rows: Tensor
    products: Tensor


class Exchange:
    """The rows of all batches for one container of experts, on their way and back.

    Args:
        team: The ranks.
        degrees: Who owns what.
        station: Names the container; all ranks must be there at the same time.
        batches: How many there are in all.
        experts: How many the container has.
        requests: Batch -> what this rank's pass has.
        like: A tensor [0, H] of the dtype and on the device of rows.
    """

    def __init__(
        self,
        team: Team,
        degrees: Degrees,
        station: str,
        batches: int,
        experts: int,
        requests: dict[int, Routed],
        like: Tensor,
    ) -> None:
        self._team, self._station, self._like = team, station, like
        self._requests = requests
        self._owned = [degrees.experts_of(rank, experts) for rank in range(team.world_size)]
        group = team.rank // degrees.ep
        self._near = [rank // degrees.ep == group for rank in range(team.world_size)]
        own = list(requests)
        parts = []
        for rank, (experts_of, near) in enumerate(zip(self._owned, self._near, strict=True)):
            del rank
            sent = [requests[b] for b in own] if near else []
            head = [r.counts[experts_of.start : experts_of.stop].cpu() for r in sent]
            parts.append(_bytes(torch.cat(head)) if head else torch.empty(0, dtype=torch.uint8))
        counted = team.exchange(f"{station}: counts", parts)
        rows = team.exchange(
            f"{station}: rows",
            [
                _bytes(torch.cat([like, *(requests[b].rows(e) for b in own)] if near else [like]))
                for e, near in zip(self._owned, self._near, strict=True)
            ],
        )
        self.arrived: list[Arrived] = []
        self._places: list[list[Arrived]] = []
        share = len(self._owned[team.rank])
        for rank in range(team.world_size):
            from_rank = list(degrees.batches_of(rank, batches)) if self._near[rank] else []
            table = counted[rank].view(torch.int64).view(-1, share)
            rows_SH = rows[rank].view(like.dtype).view(-1, like.shape[1])
            found = []
            sizes = table.sum(1).tolist()
            pieces = rows_SH.split(sizes) if sizes else ()
            # A rank without batches of its own has sent nothing.
            for batch, counts, piece in zip(from_rank, table, pieces, strict=True):
                found.append(Arrived(batch, counts, piece, torch.empty_like(piece)))
            self._places.append(found)
            self.arrived += found
        self.arrived.sort(key=lambda arrived: arrived.batch)

    def returned(self) -> dict[int, Tensor]:
        """Send the products home; return those of this rank's batches, by batch."""
        parts = [
            _bytes(torch.cat([self._like, *(a.products for a in places)]))
            for places in self._places
        ]
        found = self._team.exchange(f"{self._station}: products", parts)
        pieces: dict[int, list[Tensor]] = {batch: [self._like] for batch in self._requests}
        for experts, near, part in zip(self._owned, self._near, found, strict=True):
            if not near:
                continue
            products_SH = part.view(self._like.dtype).view(-1, self._like.shape[1])
            sizes = [
                int(r.counts[experts.start : experts.stop].sum()) for r in self._requests.values()
            ]
            for batch, piece in zip(self._requests, products_SH.split(sizes), strict=True):
                pieces[batch].append(piece)
        return {batch: torch.cat(parts) for batch, parts in pieces.items()}


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)
