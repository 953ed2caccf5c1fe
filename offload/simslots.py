"""Slots of the simulated device: what they hold, what poisons them, and who touched them last."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

_NAN, _NAN_FNUZ, _ODD = 0xFF, 0x80, 0xA5

Clock = dict[int, int]  # stream -> the last of its operations that is known to come before


def joined(one: Clock, other: Clock) -> Clock:
    """Return what either of two knows."""
    return {key: max(one.get(key, 0), other.get(key, 0)) for key in one.keys() | other.keys()}


def covers(known: Clock, operations: Clock) -> bool:
    """Whether all operations are known to come before."""
    return all(known.get(key, 0) >= tick for key, tick in operations.items())


def poison_byte(dtype: torch.dtype) -> int:
    """Return the byte that, repeated, is NaN; for whole numbers an odd one, since none is NaN.

    uint8 stands for bytes of any dtype, and is poisoned as floating point.
    """
    if dtype in (torch.float8_e4m3fnuz, torch.float8_e5m2fnuz):
        return _NAN_FNUZ
    return _NAN if dtype.is_floating_point or dtype.is_complex or dtype == torch.uint8 else _ODD


@dataclass(frozen=True, slots=True)
class Region:
    """A part of a slot, in bytes, and as what it will be read."""

    begin: int
    end: int
    dtype: torch.dtype

    def meets(self, other: Region) -> bool:
        """Whether two regions share a byte."""
        return self.begin < other.end and other.begin < self.end


@dataclass(slots=True, eq=False)
class Slot:
    """A buffer.

    Attributes:
        index: Slots count from 0 as they are allocated.
        memory: uint8 [B].
        label: Who has it.
        generation: Grows when it is handed on.
        regions: What was copied into it since then.
        writes: The last copies into it.
        reads: The last computations with it.
    """

    index: int
    memory: Tensor
    label: str = ""
    generation: int = 0
    regions: list[Region] = field(default_factory=list)
    writes: Clock = field(default_factory=dict)
    reads: Clock = field(default_factory=dict)

    def spoil(self) -> None:
        """Poison it for every view that is left; copies still queued for it come to nothing."""
        self.generation += 1
        self.memory.fill_(_NAN)
        for region in self.regions:
            self._poison(region)

    def take(self, region: Region, label: str) -> bool:
        """Poison a region that a copy will fill; return whether the slot was handed on for it.

        It is, unless the region is a further one of the label that has it.
        """
        handed_on = (
            label != self.label
            or not self.regions
            or any(region.meets(other) for other in self.regions)
        )
        if handed_on:
            self.spoil()
            self.label, self.regions = label, []
        self.regions.append(region)
        self._poison(region)
        return handed_on

    def races(self, known: Clock, label: str) -> list[str]:
        """Say whose work a copy, which comes after ``known``, may meet in this slot."""
        found = []
        if not covers(known, self.reads):
            found.append(f"the copy of {label!r} may overwrite slot {self.index} in use")
        if not covers(known, self.writes):
            found.append(f"the copies of {self.label!r} and {label!r} race for slot {self.index}")
        return found

    def _poison(self, region: Region) -> None:
        self.memory[region.begin : region.end].fill_(poison_byte(region.dtype))
