"""Matrix products of half precision where the processor has no instructions for them.

torch then multiplies bfloat16 and float16 in plain loops: 10 GFLOP/s on a core with AVX2, against
80 in float32. The operands are exact in float32, so a product there, rounded once at its end, is no
less accurate than the model's own; the two differ as processors do among each other, by the order
of their sums.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.overrides import TorchFunctionMode

# Position of (input, weight) among the arguments of every product that may hold a weight.
OPERANDS: dict[str, tuple[int, int]] = {
    "linear": (0, 1),
    "matmul": (0, 1),
    "__matmul__": (0, 1),
    "bmm": (0, 1),
    "mm": (0, 1),
    "addmm": (1, 2),
    "baddbmm": (1, 2),
}
# Values of an operand that are made float32 at a time, 4 MiB: they stay in cache.
BLOCK = 1 << 20
_ROOMS: list[Tensor] = []  # memory for blocks, for as many as multiply at a time


def fast_products(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context in which products of half precision take float32's time, where that is less.

    Gradients pass through them, and are products of the same kind. Only a CPU is concerned.
    """
    slow = slow_dtypes() if device.type == "cpu" else frozenset()
    return _InFloat32(slow) if slow else nullcontext()


def slow_dtypes() -> frozenset[torch.dtype]:
    """Return the dtypes of which this processor has no products of matrices."""
    slow = set()
    if not _has("_is_mkldnn_bf16_supported"):
        slow.add(torch.bfloat16)
    if not _has("_is_mkldnn_fp16_supported"):
        slow.add(torch.float16)
    return frozenset(slow)


def _has(question: str) -> bool:
    """Ask oneDNN, by which torch multiplies half precision; builds without it have plain loops."""
    ask = getattr(torch.ops.mkldnn, question, None)
    return bool(torch.backends.mkldnn.is_available() and ask is not None and ask())


class _InFloat32(TorchFunctionMode):
    """Takes the place of products of two tensors of these dtypes."""

    def __init__(self, dtypes: frozenset[torch.dtype]) -> None:
        super().__init__()
        self._dtypes = dtypes

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
            a, b, bias, others = _operands(name, args, kwargs)
            if not others and self._slow(a, b):
                b = b.mT if name == "linear" else b
                wanted = torch.is_grad_enabled() and any(
                    t is not None and t.requires_grad for t in (a, b, bias)
                )
                return _Product.apply(a, b, bias) if wanted else multiply(a, b, bias)
        return func(*args, **kwargs)

    def _slow(self, a: Any, b: Any) -> bool:
        """Whether both are matrices, or stacks of them, of one dtype that is slow."""
        if not (isinstance(a, Tensor) and isinstance(b, Tensor)) or min(a.ndim, b.ndim) < 2:
            return False
        return a.dtype is b.dtype and a.dtype in self._dtypes and a.device.type == "cpu"


class _Product(torch.autograd.Function):
    """`multiply` with gradients, each summed in float32 and rounded once, too."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
        """Multiply, and keep both operands as they are."""
        ctx.save_for_backward(a, b)
        ctx.added = None if bias is None else bias.shape
        return multiply(a, b, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of a, b and bias, in their shapes; None where none is asked for."""
        (a, b), (for_a, for_b, for_bias) = ctx.saved_tensors, ctx.needs_input_grad
        of_a = multiply(gradient, b.mT).sum_to_size(a.shape) if for_a else None
        of_bias = gradient.sum_to_size(ctx.added) if for_bias else None
        of_b = None
        if for_b and b.ndim == 2:
            of_b = multiply(a.flatten(0, -2).mT, gradient.flatten(0, -2))
        elif for_b:
            of_b = multiply(a.mT, gradient).sum_to_size(b.shape)
        return of_a, of_b, of_bias


def _operands(
    name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, Any, Any, dict[str, Any]]:
    """Return the two factors of a product, what is added to it, and the other arguments."""
    if OPERANDS[name] == (0, 1):
        others = dict(zip(("input", "weight", "bias"), args, strict=False)) | kwargs
        a, b, added = (others.pop(one, None) for one in ("input", "weight", "bias"))
        return a, b, added, others
    added, a, b = args if len(args) == 3 else (None, None, None)
    return a, b, added, kwargs


def multiply(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return ``a @ b + bias``, summed in float32 and rounded once.

    Args:
        a: Of a dtype that float32 holds, [..., M, K].
        b: Of the same dtype, [K, R] or [..., K, R] with leading axes that broadcast with a's.
        bias: Broadcast to the result, or None.

    Returns:
        Of a's dtype, [..., M, R]; at most half a step of it, and the float32 sum's error, off.
    """
    leading = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    product = a.new_empty(*leading, a.shape[-2], b.shape[-1])
    added = None if bias is None else bias.expand(product.shape)
    if b.ndim == 2:  # all rows at once
        rows = a.reshape(-1, a.shape[-1])
        flat = None if added is None else added.reshape(-1, b.shape[1])
        _into(product.view(-1, b.shape[1]), rows, b, flat)
        return product
    a, b = a.expand(*leading, *a.shape[-2:]), b.expand(*leading, *b.shape[-2:])
    for index in itertools.product(*map(range, leading)):
        _into(product[index], a[index], b[index], None if added is None else added[index])
    return product


def _into(product: Tensor, a: Tensor, b: Tensor, bias: Tensor | None) -> None:
    """Write ``a [M, K] @ b [K, R] + bias [M, R]``, a few rows and columns at a time."""
    depth = a.shape[1]
    step = max(1, min(BLOCK // max(1, depth), math.isqrt(BLOCK)))
    with _room(max(BLOCK, depth)) as (of_a, of_b, of_product):
        for left in range(0, b.shape[1], step):
            columns = slice(left, left + step)
            wide_b = _held(of_b, b[:, columns].mT).copy_(b[:, columns].mT).mT
            for top in range(0, len(a), step):
                rows = slice(top, top + step)
                wide_a = _held(of_a, a[rows]).copy_(a[rows])
                part = torch.mm(wide_a, wide_b, out=_held(of_product, product[rows, columns]))
                product[rows, columns] = part if bias is None else part.add_(bias[rows, columns])


def _held(room: Tensor, like: Tensor) -> Tensor:
    return room[: like.numel()].view(like.shape)


@contextmanager
def _room(size: int) -> Iterator[Tensor]:
    """Lend float32 [3, size or more], undefined; whoever multiplies next takes it again.

    Allocated anew for each block, its pages would be new ones each time, too: a third of a run.
    """
    room = _ROOMS.pop() if _ROOMS else torch.empty(0, 0)
    if room.numel() < 3 * size:
        with torch.inference_mode(False):  # for callers in it, and others
            room = torch.empty(3, size)
    yield room
    _ROOMS.append(room)
