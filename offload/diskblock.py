"""Blocks that are filled from a checkpoint's files: where each tensor lies, and how it gets there.

Tensors that the files hold as the model wants them, and that follow one another there, lie in a
block as on disk, down to their place in a page of memory. So a whole run of them is read by one
request, and past the page cache without being copied once more. What is stored in another form is
read tensor by tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from modelopt_lite.checkpoint.dequant import DequantizedSource, Source
from modelopt_lite.checkpoint.fill import read_entries
from modelopt_lite.checkpoint.header import TensorInfo
from modelopt_lite.checkpoint.names import TensorGroup
from modelopt_lite.checkpoint.reader import Checkpoint
from modelopt_lite.checkpoint.uncached import ALIGN as PAGE
from modelopt_lite.checkpoint.uncached import WORTH_A_REQUEST
from modelopt_lite.offload.cargo import ALIGN, packed_bytes, span_bytes, view_of
from modelopt_lite.offload.device import as_bytes


@dataclass(frozen=True, slots=True)
class Part:
    """A tensor's place in a block, and where its bytes come from: the disk, or memory.

    ``info`` is its place in a file that holds its bytes as they are; None where none does. The
    files are right as long as the tensor has ``version``.
    """

    offset: int
    like: Tensor
    target: str
    group: TensorGroup | None
    info: TensorInfo | None
    position: tuple[str, int]  # file and byte, so that a disk is read forward
    version: int = 0


class BlockSource:
    """All bytes of one block, from a checkpoint's files or memory: a `DiskSource`.

    Attributes:
        in_memory: Nothing of it is on disk.
    """

    def __init__(self, source: Source | None, parts: Sequence[Part]) -> None:
        self._source = source
        self._parts = list(parts)
        self._requests = self._grouped()
        self.in_memory = all(part.group is None for part in parts)

    def read_into(self, dst: Tensor, /) -> None:
        """Fill a block, uint8 [B] in host memory; each tensor on disk is read once.

        Raises:
            CheckpointError: A file cannot be read, or was changed.
        """
        for parts in self._requests:
            first, last = parts[0], parts[-1]
            if first.info is not None:
                end = last.offset + span_bytes(last.like)
                infos = [part.info for part in parts if part.info is not None]
                assert self._source is not None
                base_of(self._source).read_run(infos, dst[first.offset : end])
            elif first.group is not None:
                assert self._source is not None
                views = {part.target: view_of(dst, part.offset, part.like) for part in parts}
                read_entries(first.group, self._source.read, views, keep=drop)
            else:
                view = view_of(dst, first.offset, first.like)
                np.copyto(as_bytes(view).numpy(), as_bytes(first.like).numpy())

    def take_from_memory(self, index: int) -> None:
        """From now on copy the tensor of an index from where it rests, as its values changed."""
        old = self._parts[index]
        self._parts[index] = replace(old, group=None, info=None, position=("", index))
        self._requests = self._grouped()

    def follow(self, versions: Sequence[int]) -> None:
        """Copy those tensors from memory from now on that have other versions than on disk."""
        for index, version in enumerate(versions):
            part = self._parts[index]
            if part.group is not None and part.version != version:
                self.take_from_memory(index)

    def _grouped(self) -> list[list[Part]]:
        """Parts by what is read at once, in the order of the disk."""
        requests: list[list[Part]] = []
        groups: dict[int, list[Part]] = {}
        for part in sorted(self._parts, key=lambda part: part.position):
            if part.info is not None:
                if requests and _follows(part, requests[-1][-1]):
                    requests[-1].append(part)
                else:
                    requests.append([part])
            elif id(part.group or part) in groups:
                groups[id(part.group or part)].append(part)
            else:
                requests.append(groups.setdefault(id(part.group or part), [part]))
        return requests


def _follows(part: Part, before: Part) -> bool:
    """Whether a part comes right after another on disk and in the block."""
    if part.info is None or before.info is None:
        return False
    apart = part.info.start - before.info.start
    return (
        part.info.file == before.info.file
        and part.info.start == before.info.end
        and part.offset - before.offset == apart
    )


def block_from_memory(tensors: Sequence[Tensor], offsets: Sequence[int]) -> BlockSource:
    """Return a source that copies tensors to their places from where they are."""
    pairs = zip(tensors, offsets, strict=True)
    parts = [
        Part(to, t.detach(), f"#{at}", None, None, ("", at)) for at, (t, to) in enumerate(pairs)
    ]
    return BlockSource(None, parts)


def plan_as_on_disk(
    tensors: Sequence[Tensor], infos: Sequence[TensorInfo | None]
) -> tuple[tuple[int, ...], int]:
    """Return each tensor's offset in a block that begins at a page, and the block's size in bytes.

    Args:
        tensors: At rest.
        infos: Their places in files that hold their bytes as they are.

    Runs that are worth a request of their own lie as on disk; other tensors as `plan_block` says.
    """
    offsets, end = [0] * len(tensors), 0
    for run in _runs(infos):
        start = infos[run[0]]
        size = sum(span_bytes(tensors[index]) for index in run)
        if start is not None and size >= WORTH_A_REQUEST:
            end += (start.start - end) % PAGE
            for index in run:
                offsets[index] = end
                end += span_bytes(tensors[index])
            end += -end % ALIGN
            continue
        for index in run:
            offsets[index] = end
            end += packed_bytes(tensors[index])
    return tuple(offsets), end


def most_as_on_disk(tensor: Tensor) -> int:
    """Bytes that a tensor takes in such a block at most, whatever else is in it."""
    return packed_bytes(tensor) + PAGE


def _runs(infos: Sequence[TensorInfo | None]) -> Iterator[list[int]]:
    """Indices of tensors that follow one another in a file; of others, each alone."""
    run: list[int] = []
    known = [(str(i.file), i.start, at) for at, i in enumerate(infos) if i is not None]
    for _, _, at in sorted(known):
        info, last = infos[at], infos[run[-1]] if run else None
        if last and info and (last.file, last.end) != (info.file, info.start):
            yield run
            run = []
        run.append(at)
    if run:
        yield run
    yield from ([at] for at, info in enumerate(infos) if info is None)


def base_of(source: Source) -> Checkpoint:
    """The checkpoint as it lies on disk."""
    return source.base if isinstance(source, DequantizedSource) else source


def drop(name: str, value: torch.Tensor) -> None:
    """Ignore a tensor that `read_entries` shows."""
