"""What moves: the tensors of one label, packed into one block of bytes.

A tensor keeps its identity: while its label is in, its ``data`` is a view of the slot on the
device, and otherwise the view of host memory (or of the mapped file) that holds its true values. So
``state_dict`` and ``save_pretrained`` give true weights at any moment between two uses.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from modelopt_lite.offload.device import CopySource, DiskSource

ALIGN = 128  # bytes; a cache line pair, and what vectorised loads on accelerators want


@dataclass(frozen=True, slots=True)
class Managed:
    """A tensor that the runtime may move.

    ``holder`` is the tensor itself, or for a field of another tensor (``weight.scale``) that other
    tensor, with the field's name.
    """

    name: str
    holder: Tensor
    field: str | None = None

    @property
    def tensor(self) -> Tensor:
        """The tensor as it is now."""
        value = self.holder if self.field is None else getattr(self.holder, self.field)
        assert isinstance(value, Tensor)
        return value

    @property
    def nbytes(self) -> int:
        """Bytes that its values take when packed."""
        return span_bytes(self.tensor)

    def bind(self, value: Tensor) -> None:
        """Let the tensor have the values, and the device, of another of its shape."""
        self.tensor.data = value


def inner_fields(tensor: Tensor) -> dict[str, Tensor]:
    """Return the tensors that are public attributes of a tensor, as FP8 scales often are."""
    found = {}
    for name in vars(tensor) if hasattr(tensor, "__dict__") else ():
        value = getattr(tensor, name, None)
        if not name.startswith("_") and isinstance(value, Tensor) and name != "grad":
            found[name] = value
    return found


def get_inner_tensor_field_ids(tensor: Tensor) -> list[int]:
    """Return the ids of a tensor's inner fields (seed 003)."""
    return [id(value) for value in inner_fields(tensor).values()]


def span_bytes(tensor: Tensor) -> int:
    """Bytes from a tensor's first value to its last, gaps between strides included."""
    if not tensor.numel():
        return 0
    last = sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    return int((last + 1) * tensor.element_size())


@dataclass(frozen=True, slots=True)
class Cargo:
    """The tensors of a label and their places in a block.

    ``source`` gives all bytes of the block; ``resting`` the values that each tensor has outside.
    """

    label: str
    tensors: tuple[Managed, ...]
    offsets: tuple[int, ...]
    nbytes: int
    source: CopySource
    resting: tuple[Tensor, ...]

    def bind(self, block: Tensor) -> None:
        """Let every tensor read from a block that holds the cargo's bytes."""
        for managed, offset, rest in zip(self.tensors, self.offsets, self.resting, strict=True):
            managed.bind(view_of(block, offset, rest))

    def unbind(self) -> None:
        """Let every tensor have its true values again."""
        for managed, rest in zip(self.tensors, self.resting, strict=True):
            managed.bind(rest)


def plan_block(tensors: Sequence[Tensor]) -> tuple[tuple[int, ...], int]:
    """Return each tensor's offset in a block, and the block's size in bytes."""
    offsets, end = [], 0
    for tensor in tensors:
        offsets.append(end)
        end += -(-span_bytes(tensor) // ALIGN) * ALIGN
    return tuple(offsets), end


def view_of(block: Tensor, offset: int, like: Tensor) -> Tensor:
    """Return the part of a uint8 block that has another tensor's dtype, shape and strides."""
    raw = block[offset : offset + span_bytes(like)].view(like.dtype)
    return raw.as_strided(like.shape, like.stride())


def pack(label: str, tensors: Iterable[Managed], block: Tensor | None) -> Cargo:
    """Copy tensors into one host block, which they then rest in.

    Args:
        label: Whose they are.
        tensors: In the order of their offsets.
        block: Host memory of the size of `plan_block`; None: new memory. Their old storage is given
            up, so the peak is one label's bytes above the model's.
    """
    managed = tuple(tensors)
    values = [m.tensor.detach() for m in managed]
    offsets, size = plan_block(values)
    room = torch.empty(size, dtype=torch.uint8) if block is None else block
    resting = []
    for offset, value in zip(offsets, values, strict=True):
        view = view_of(room, offset, value)
        view.copy_(value)
        resting.append(view)
    cargo = Cargo(label, managed, offsets, size, room, tuple(resting))
    cargo.unbind()
    return cargo


def from_disk(label: str, tensors: Iterable[Managed], source: DiskSource) -> Cargo:
    """Return a cargo whose bytes lie on disk; its tensors rest as they are (mapped files)."""
    managed = tuple(tensors)
    values = tuple(m.tensor.detach() for m in managed)
    offsets, size = plan_block(values)
    return Cargo(label, managed, offsets, size, source, values)


@dataclass(frozen=True, slots=True)
class IndirectCargo(Cargo):
    """A cargo whose tensors are left alone; ``table`` tells who reads what instead, by id."""

    table: dict[int, Tensor]

    def bind(self, block: Tensor) -> None:
        """Enter the device views into the table."""
        for managed, offset, rest in zip(self.tensors, self.offsets, self.resting, strict=True):
            self.table[id(managed.tensor)] = view_of(block, offset, rest)

    def unbind(self) -> None:
        """Take them out again."""
        for managed in self.tensors:
            self.table.pop(id(managed.tensor), None)
