"""What a matrix has become, put into the model, so that later layers see it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from modelopt_lite.offload.store import Loaded


@dataclass(frozen=True, slots=True)
class Made:
    """What a matrix has become, in the place that it has in the model.

    Attributes:
        entry: The model's parameter.
        region: Which part of it, () for all: of a stack, the expert comes first.
        inner: Which part of that.
        value: As it lies there.
    """

    entry: str
    region: tuple[Any, ...]
    inner: tuple[Any, ...]
    value: Tensor

    def put_into(self, loaded: Loaded) -> None:
        """Write it into a unit that is in memory, which may hold a few experts of a stack."""
        region, experts = self.region, loaded.unit.experts
        target = loaded.buffers[self.entry]
        if loaded.unit.is_stacked and experts is not None and region and isinstance(region[0], int):
            region = (region[0] - experts.start, *region[1:])
        target = target[region] if region else target
        target = target[self.inner] if self.inner else target
        target.copy_(self.value)
