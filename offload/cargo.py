"""What moves: the tensors of one label, packed into one block of bytes.

A tensor keeps its identity: while its label is in, its ``data`` is a view of the slot on the
device, and otherwise the view of host memory (or of the mapped file) that holds its true values. So
``state_dict`` and ``save_pretrained`` give true weights at any moment between two uses.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from modelopt_lite.errors import OffloadError
from modelopt_lite.offload.device import CopySource, new_buffer
from modelopt_lite.offload.ledger import Tier

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

    @property
    def version(self) -> int:
        """A number that grows when the tensor is changed in place."""
        tensor = self.tensor
        return 0 if tensor.is_inference() else tensor._version

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

    @property
    def tier(self) -> Tier:
        """Where the bytes are between two uses."""
        in_memory = isinstance(self.source, Tensor) or getattr(self.source, "in_memory", False)
        return "host" if in_memory else "disk"

    @property
    def versions(self) -> tuple[int, ...]:
        """Of each tensor; another answer than before means that values were changed in place."""
        return tuple(managed.version for managed in self.tensors)

    def copies(self, block: Tensor) -> Iterator[tuple[Tensor, CopySource]]:
        """Yield what to copy to which part of a block."""
        yield block[: self.nbytes], self.source

    def views(self, block: Tensor) -> tuple[Tensor, ...]:
        """Return each tensor's part of a block that holds the cargo's bytes."""
        with torch.inference_mode(False):
            pairs = zip(self.offsets, self.resting, strict=True)
            return tuple(view_of(block, offset, rest) for offset, rest in pairs)

    def bind(self, views: Sequence[Tensor]) -> None:
        """Let every tensor read from its part of a block."""
        for managed, view in zip(self.tensors, views, strict=True):
            managed.bind(view)

    def unbind(self) -> None:
        """Let every tensor have its true values again."""
        for managed, rest in zip(self.tensors, self.resting, strict=True):
            managed.bind(rest)

    def adopt(self) -> bool:
        """Keep values that were given to a tensor by ``tensor.data = ...`` since it came to rest.

        Returns:
            Whether there were any: what was copied before is out of date then.

        Raises:
            OffloadError: They have another shape or dtype.
        """
        with torch._C.DisableTorchFunction(), torch.inference_mode(False):
            pairs = zip(self.tensors, self.resting, strict=True)
            given = [managed.tensor.data_ptr() != rest.data_ptr() for managed, rest in pairs]
            if not any(given):
                return False
            values = [managed.tensor.data for managed in self.tensors]
            for managed, value, rest in zip(self.tensors, values, self.resting, strict=True):
                if value.shape != rest.shape or value.dtype != rest.dtype:
                    raise OffloadError(
                        f"{managed.name!r} was given {value.dtype} {list(value.shape)} in place of "
                        f"{rest.dtype} {list(rest.shape)}; release() the model before"
                    )
            pairs_of = zip(self.versions, given, strict=True)
            self.write_back(values, [now - is_new for now, is_new in pairs_of])
            self.unbind()
        return True

    def write_back(self, views: Sequence[Tensor], before: Sequence[int]) -> None:
        """Keep what was changed in place in a block since the tensors had the given versions."""
        triples = zip(self.versions, before, views, self.resting, strict=True)
        for now, then, view, rest in triples:
            if now != then:
                with torch.inference_mode(False), torch.no_grad():
                    rest.copy_(view)


def packed_bytes(tensor: Tensor) -> int:
    """Bytes that a tensor takes in a block, up to where the next one may begin."""
    return -(-span_bytes(tensor) // ALIGN) * ALIGN


def plan_block(tensors: Sequence[Tensor]) -> tuple[tuple[int, ...], int]:
    """Return each tensor's offset in a block, and the block's size in bytes."""
    offsets, end = [], 0
    for tensor in tensors:
        offsets.append(end)
        end += packed_bytes(tensor)
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
    with torch.inference_mode(False), torch.no_grad():
        values = [m.tensor.detach() for m in managed]
        offsets, size = plan_block(values)
        room = new_buffer(size, torch.device("cpu")) if block is None else block
        resting = []
        for offset, value in zip(offsets, values, strict=True):
            count = span_bytes(value) // value.element_size()
            # Gaps between strides go along: a tensor that overlaps itself cannot be written to.
            flat = room[offset : offset + span_bytes(value)].view(value.dtype)
            flat.copy_(value.as_strided((count,), (1,)))
            resting.append(flat.as_strided(value.shape, value.stride()))
    cargo = Cargo(label, managed, offsets, size, room, tuple(resting))
    cargo.unbind()
    return cargo


@dataclass(frozen=True, slots=True)
class IndirectCargo(Cargo):
    """A cargo whose tensors are left alone; ``table`` tells who reads what instead, by id."""

    table: dict[int, Tensor]

    def bind(self, views: Sequence[Tensor]) -> None:
        """Enter the device views into the table."""
        for managed, view in zip(self.tensors, views, strict=True):
            self.table[id(managed.tensor)] = view

    def unbind(self) -> None:
        """Take them out again."""
        for managed in self.tensors:
            self.table.pop(id(managed.tensor), None)


def is_plain(tensor: Tensor) -> bool:
    """Whether a tensor's values are bytes of one storage."""
    return tensor.layout == torch.strided and not is_traceable_wrapper_subclass(tensor)


def can_move(tensor: Tensor) -> bool:
    """Whether a tensor can go to a block."""
    return is_plain(tensor) and tensor.numel() > 0


def storage_of(tensor: Tensor) -> int:
    """Return the address of a tensor's storage."""
    return tensor.untyped_storage().data_ptr()


def differs(tensor: Tensor, value: Tensor) -> bool:
    """Whether values are not the same bytes; NaN equals itself."""
    one, other = tensor.data.to(value.device), value
    return not torch.equal(
        one.contiguous().view(-1).view(torch.uint8), other.contiguous().view(-1).view(torch.uint8)
    )
