"""Blocks whose memory is taken when a copy is issued and given back after the compute.

``transfer_mode="strategy"``: no memory is allocated before it is needed, so that less is taken
between passes, and by smaller units, for the allocations in every pass. What is copied when, and
the highest peak, are those of blocks that stay.
"""

from __future__ import annotations

import torch
from torch import Tensor

from modelopt_lite.offload.cargo import Cargo
from modelopt_lite.offload.device import new_buffer
from modelopt_lite.offload.loader import Block, BlockLoader


class OnDemandLoader(BlockLoader):
    """Moves cargos through memory of their own size. For arguments see `BlockLoader`."""

    def enter(self, label: str) -> None:
        """See `BlockLoader.enter`."""
        self._sweep()
        super().enter(label)

    def exit(self, label: str) -> None:
        """See `BlockLoader.exit`."""
        super().exit(label)
        self._sweep()

    def _first_memory(self, size: int) -> Tensor:
        return new_buffer(0, torch.device("cpu"))

    def _views_in(self, cargo: Cargo, block: Block) -> tuple[Tensor, ...]:
        return cargo.views(block.memory)

    def _issue(self, cargo: Cargo, block: Block) -> None:
        self._give_back(block)
        block.memory = self._allocate(cargo.nbytes)
        try:
            super()._issue(cargo, block)
        except BaseException:
            self._free(block.memory)
            block.memory = self._first_memory(0)
            raise

    def _sweep(self) -> None:
        """Give back what was computed with, as far as that is done by now."""
        for block in self._blocks.values():
            spent = block.used and not block.users and block.memory.numel()
            if spent and self._device.query(block.last_use):
                self._give_back(block)

    def _give_back(self, block: Block) -> None:
        if block.memory.numel():
            # Nothing may be on its way to it, and nothing compute with it any more.
            self._device.synchronize(block.ready)
            if block.used:
                self._device.synchronize(block.last_use)
            self._free(block.memory)
        block.memory, block.content, block.used = self._first_memory(0), None, False
