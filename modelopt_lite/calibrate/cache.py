"""Statistics of the keys and values of every attention layer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from modelopt_lite.formats.base import Numerics


class Seen(Protocol):
    """What was seen of the keys, or the values, of one layer."""

    def part(self, x: Tensor) -> Any:
        """Return what is needed of one call's [B, heads, T, head_dim]; it can be sent on."""

    def take(self, part: Any) -> None:
        """Take a part into account, here or in another process; the order counts."""

    @property
    def amax(self) -> Tensor:
        """Largest magnitude of what is rounded, []."""

    @property
    def bias(self) -> Tensor | None:
        """What is subtracted before rounding, [1, heads, 1, head_dim]; None for nothing."""


class _Plain:
    """The largest magnitude, in the dtype of the tensor."""

    bias = None

    def __init__(self) -> None:
        self.amax = torch.zeros(())

    def part(self, x: Tensor) -> Tensor:
        return _amax(x)

    def take(self, part: Tensor) -> None:
        self.amax = torch.maximum(self.amax.to(part), part)


class _Centred:
    """The mean over all tokens, and the largest distance of any value from it.

    The lowest and highest value of each channel give that distance once the mean is known.
    """

    def __init__(self) -> None:
        self._total = self._low = self._high = torch.zeros(())
        self._count = 0

    def part(self, x: Tensor) -> tuple[Tensor, int, Tensor, Tensor]:
        ends = x.amin(dim=(0, 2), keepdim=True), x.amax(dim=(0, 2), keepdim=True)
        total = x.sum(dim=(0, 2), keepdim=True, dtype=torch.float64)
        return total, x.shape[0] * x.shape[2], *ends

    def take(self, part: tuple[Tensor, int, Tensor, Tensor]) -> None:
        total, count, low, high = part
        if not self._count:
            self._total, self._low, self._high = torch.zeros_like(total), low, high
        self._total += total
        self._count += count
        self._low = torch.minimum(self._low, low)
        self._high = torch.maximum(self._high, high)

    @property
    def bias(self) -> Tensor:
        return (self._total / self._count).to(self._low.dtype)

    @property
    def amax(self) -> Tensor:
        bias = self.bias.float()
        return torch.maximum(self._high.float() - bias, bias - self._low.float()).amax()


class _CentredByCall:
    """What the peer has: the mean of the means of calls, rounded after each.

    The largest distance is from the mean as it was at each call.
    """

    def __init__(self) -> None:
        self.bias = self.amax = torch.zeros(())
        self._calls = 0

    def part(self, x: Tensor) -> Tensor:
        return x  # distances are from what is known by then

    def take(self, part: Tensor) -> None:
        x = part
        mean = x.mean(dim=(0, 2), keepdim=True)
        total = self.bias.float() * self._calls + mean.float()
        self._calls += 1
        self.bias = (total / self._calls).to(x.dtype)
        self.amax = torch.maximum(self.amax.to(x), _amax(x - self.bias))


@dataclass(slots=True)
class CacheStats:
    """What was seen of keys and values, by attention module.

    Attributes:
        affine: Find a bias, too.
        numerics: How the bias is found.
        key: Module -> its keys.
        value: Module -> its values.
    """

    affine: bool = False
    numerics: Numerics = "exact"
    key: dict[str, Seen] = field(default_factory=dict)
    value: dict[str, Seen] = field(default_factory=dict)

    def visit(self, module: str, key: Tensor, value: Tensor) -> None:
        """Take one call into account; keys and values are [B, heads, T, head_dim]."""
        self.take(module, self.part(key.detach()), self.part(value.detach()))

    def part(self, x: Tensor) -> Any:
        """Return what `take` needs of the keys, or the values, of one call."""
        return self.empty().part(x)

    def take(self, module: str, key: Any, value: Any) -> None:
        """Take the parts of one call into account; calls come in their order."""
        for stats, part in ((self.key, key), (self.value, value)):
            if module not in stats:
                stats[module] = self.empty()
            stats[module].take(part)

    def empty(self) -> Seen:
        """Return what sees the keys or the values of one module."""
        if not self.affine:
            return _Plain()
        return _Centred() if self.numerics == "exact" else _CentredByCall()


def _amax(x: Tensor) -> Tensor:
    low, high = torch.aminmax(x)
    return torch.maximum(-low, high)
