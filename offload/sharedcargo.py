"""Host weights that several processes share (``shm_enabled``).

Each process loads the model as it likes. The first one that offloads it moves the weights of its
units to a shared file; every other one finds there the same bytes, compares them with its own, and
gives its own up. Plans may differ: what one process keeps on its device stays in the file for the
others.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from modelopt_lite.errors import OffloadError
from modelopt_lite.offload.cargo import (
    Cargo,
    Managed,
    differs,
    packed_bytes,
    plan_block,
    span_bytes,
    view_of,
)
from modelopt_lite.offload.config import OffloadConfig
from modelopt_lite.offload.device import CopySource, Device
from modelopt_lite.offload.sharedfile import SharedFile
from modelopt_lite.offload.tensors import TensorManager

SHARED = "shared weights"  # whose bytes they are in the ledger


@dataclass(frozen=True, slots=True)
class SharedCargo(Cargo):
    """A cargo whose tensors lie somewhere in the shared bytes, which are its ``source``.

    ``starts`` says where each does. ``private``: what is written to them stays in this process.
    """

    starts: tuple[int, ...]
    private: bool

    def copies(self, block: Tensor) -> Iterator[tuple[Tensor, CopySource]]:
        """See `Cargo.copies`. Neighbours that are neighbours in the file, too, go together."""
        assert isinstance(self.source, Tensor)
        sizes = [packed_bytes(rest) for rest in self.resting]
        runs: list[tuple[int, int, int]] = []  # in the block, in the file, bytes
        for offset, start, size in zip(self.offsets, self.starts, sizes, strict=True):
            at, source, length = runs[-1] if runs else (0, -1, 0)
            if source + length == start and at + length == offset:
                runs[-1] = at, source, length + size
            else:
                runs.append((offset, start, size))
        for at, source, length in runs:
            yield block[at : at + length], self.source[source : source + length]

    def write_back(self, views: Sequence[Tensor], before: Sequence[int]) -> None:
        """See `Cargo.write_back`. Values that other processes read, too, are not changed."""
        if not self.private and self.versions != tuple(before):
            raise OffloadError(
                f"{self.label!r} changes its weights in place, and they are shared with other "
                "processes; set shm_enabled=False"
            )
        Cargo.write_back(self, views, before)


class SharedTensorManager(TensorManager):
    """Owns the tensors of a model whose units rest in a `SharedFile`."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._file: SharedFile | None = None
        self._bytes = torch.empty(0, dtype=torch.uint8)  # the file's, pinned where need be
        self._starts: dict[int, int] = {}
        self._known: set[int] = set()  # tensors that had the shared values once
        self._private = _private(self._config, self._device)

    def can_split(self, parameter: nn.Parameter) -> bool:
        """See `RowTensors.can_split`. The file has whole tensors."""
        return False

    def release(self, *, keep: bool = True) -> None:
        """See `TensorManager.release`."""
        super().release(keep=keep)
        self._starts.clear()
        self._known.clear()
        if self._file is not None:
            self._file.close()
            self._file = None

    def _lay_out(self, moving: Mapping[str, Sequence[Managed]]) -> None:
        if any(id(m.tensor) not in self._starts for ms in moving.values() for m in ms):
            self._open(moving)
        super()._lay_out(moving)
        if self._file is not None:
            self._file.complete()
            # The file keeps what this process may have on its device by now.
            for label in moving:
                self.ledger.remove("host", label)
            self.ledger.remove("host", SHARED)
            self.ledger.add("host", SHARED, self._bytes.numel())

    def _open(self, moving: Mapping[str, Sequence[Managed]]) -> None:
        """Find the file for all that may move."""
        named = [(label, m) for label, managed in moving.items() for m in managed]
        starts, size = plan_block([m.tensor for _, m in named])
        layout = [
            (label, m.name, str(m.tensor.dtype), list(m.tensor.shape), m.tensor.stride(), start)
            for (label, m), start in zip(named, starts, strict=True)
        ]
        before, self._file = self._file, None
        if before is not None:
            before.close()
        self._file = SharedFile(
            self._config.shm_namespace or "",
            json.dumps(layout),
            size,
            wait_timeout=self._config.shm_wait_timeout,
            private=self._private,
        )
        self._starts = {id(m.tensor): s for (_, m), s in zip(named, starts, strict=True)}
        self._bytes = self._file.bytes
        if not self._private:
            self._bytes = self._device.pin(self._bytes, "in_place")

    def _pack(self, label: str, managed: Sequence[Managed]) -> Cargo:
        starts = tuple(self._starts[id(m.tensor)] for m in managed)
        resting = tuple(self._rest(m, start) for m, start in zip(managed, starts, strict=True))
        offsets, size = plan_block(resting)
        cargo = SharedCargo(
            label, tuple(managed), offsets, size, self._bytes, resting, starts, self._private
        )
        cargo.unbind()
        self._known |= {id(m.tensor) for m in managed}
        return cargo

    def _rest(self, managed: Managed, start: int) -> Tensor:
        """Return a tensor's view of the shared bytes, which are its own."""
        assert self._file is not None
        with torch.inference_mode(False), torch.no_grad():
            value = managed.tensor.detach()
            view = view_of(self._bytes, start, value)
            if value.data_ptr() == view.data_ptr():
                return view
            if self._file.writing:
                count = span_bytes(value) // value.element_size()
                flat = value.as_strided((count,), (1,)).cpu().view(torch.uint8)
                self._file.write(start, flat)
            elif not differs(view, value):
                pass
            elif self._private and id(managed.tensor) in self._known:
                view.copy_(value)  # changed by this process, while it was on the device
            else:
                raise OffloadError(
                    f"{managed.name!r} has other values in this process than in the weights that "
                    f"are shared as {self._config.shm_namespace!r}; give other weights a "
                    "shm_namespace of their own"
                )
        return view


def _private(config: OffloadConfig, device: Device) -> bool:
    """Whether changes stay in this process: pages that are pinned for a device cannot be so."""
    return not config.pinned_memory or device.torch_device.type == "cpu"
