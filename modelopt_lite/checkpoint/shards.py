"""Where every byte of a checkpoint's weight files will lie, from names, dtypes and shapes alone.

A large model has hundreds of thousands of tensors: texts that describe them all (headers, index)
are made when they are needed and not kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from json.encoder import encode_basestring, encode_basestring_ascii
from math import prod
from pathlib import Path

import torch

from modelopt_lite.checkpoint.header import DTYPE_NAMES, TensorInfo
from modelopt_lite.checkpoint.reader import SINGLE_FILE
from modelopt_lite.checkpoint.table import TensorTable
from modelopt_lite.errors import InternalError

TensorPlan = tuple[str, torch.dtype, tuple[int, ...]]
_Sized = tuple[str, torch.dtype, tuple[int, ...], int]  # with its bytes


@dataclass(frozen=True, slots=True)
class ShardFile:
    """One file to be: a header, and the tensors that follow it in their order.

    Attributes:
        table: The tensors of all files; ``numbers`` are this one's.
    """

    name: str
    table: TensorTable
    numbers: range
    size: int

    @property
    def tensors(self) -> tuple[TensorInfo, ...]:
        """Its tensors, made when asked for."""
        return tuple(map(self.table.at, self.numbers))

    def header(self) -> bytes:
        """Return its first bytes, length included."""
        infos = map(self.table.at, self.numbers)
        return b"".join(_header((info.name, info.dtype, info.shape, info.nbytes) for info in infos))


@dataclass(frozen=True, slots=True)
class ShardLayout:
    """Every byte of a checkpoint's weight files and index.

    Attributes:
        files: The shards in order.
        tensors: What they hold; paths are relative to the folder to be.
        total_size: Bytes of all tensors, as the index states.
    """

    files: tuple[ShardFile, ...]
    tensors: TensorTable
    total_size: int

    @property
    def index(self) -> bytes:
        """The bytes of ``model.safetensors.index.json``; empty where one file holds all."""
        if len(self.files) == 1:
            return b""
        # As transformers writes it: json.dumps(…, indent=2, sort_keys=True), which is slow.
        name_of = self.tensors.name
        rows = sorted(
            (name_of(number), file.name) for file in self.files for number in file.numbers
        )
        text = ",\n".join(f'    {encode_basestring_ascii(name)}: "{file}"' for name, file in rows)
        head = f'{{\n  "metadata": {{\n    "total_size": {self.total_size}\n  }},\n'
        return f'{head}  "weight_map": {{\n{text}\n  }}\n}}\n'.encode()

    @property
    def total_bytes(self) -> int:
        """Bytes on disk: headers, tensors and index."""
        return sum(file.size for file in self.files) + len(self.index)


@dataclass(frozen=True, slots=True)
class ExportLayout:
    """The weight files of an export, or of several that are written together.

    Attributes:
        parts: Folder below that of the export ("" for itself) -> what lies there.
    """

    parts: Mapping[str, ShardLayout]

    @property
    def paths(self) -> dict[str, int]:
        """Each weight file, relative to the export's folder, and its size."""
        return {
            str(Path(folder) / file.name): file.size
            for folder, layout in self.parts.items()
            for file in layout.files
        }

    @property
    def total_size(self) -> int:
        """Bytes of all tensors."""
        return sum(layout.total_size for layout in self.parts.values())

    @property
    def total_bytes(self) -> int:
        """Bytes on disk: headers, tensors and indexes."""
        return sum(layout.total_bytes for layout in self.parts.values())


def plan_layout(tensors: Iterable[TensorPlan], max_shard_size: int) -> ShardLayout:
    """Divide tensors into shards, in the given order.

    A shard is closed when the next tensor would take its tensors' bytes above
    ``max_shard_size``; only a single tensor above the limit exceeds it, alone in its shard. The
    header, a few hundred bytes per tensor at most, is not counted. Within a shard the tensors lie
    by descending item size, then in the given order, so each is aligned to its item size.

    Raises:
        InternalError: No tensors, a name given twice, or a dtype that safetensors lacks.
    """
    table = _fill(tensors, max_shard_size)
    if not len(table):
        raise InternalError("a checkpoint without tensors was planned")
    count = len(table.files)
    names = [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
    table.files = [Path(name) for name in (names if count > 1 else [SINGLE_FILE])]
    numbers = map(table.of_file, range(count))
    files = tuple(
        ShardFile(path.name, table, own, table.at(own[-1]).end)
        for path, own in zip(table.files, numbers, strict=True)
    )
    return ShardLayout(files, table, sum(info.nbytes for info in table.values()))


def _fill(tensors: Iterable[TensorPlan], max_shard_size: int) -> TensorTable:
    """Place tensors in files, which have numbers for names until it is known how many they are."""

    def placed() -> Iterator[TensorInfo]:
        group: list[_Sized] = []
        filled = number = 0
        for name, dtype, shape in tensors:
            if name == "__metadata__":
                raise InternalError(f"tensor {name!r} has a reserved name")
            if dtype not in DTYPE_NAMES:
                raise InternalError(f"tensor {name!r} has dtype {dtype}, which safetensors lacks")
            size = prod(shape) * dtype.itemsize
            if group and filled + size > max_shard_size:
                yield from _place(group, Path(str(number)))
                group, filled, number = [], 0, number + 1
            group.append((name, dtype, shape, size))
            filled += size
        yield from _place(group, Path(str(number)))

    try:
        return TensorTable(placed())
    except ValueError as error:
        raise InternalError(f"tensor {error.args[0]!r} was planned twice") from error


def _place(tensors: Sequence[_Sized], file: Path) -> Iterator[TensorInfo]:
    """Lay the tensors of a file behind its header."""
    ordered = sorted(tensors, key=lambda tensor: -tensor[1].itemsize)  # stable
    position = sum(map(len, _header(ordered)))
    for name, dtype, shape, size in ordered:
        yield TensorInfo(name, dtype, shape, file, position, position + size)
        position += size


def _header(tensors: Iterable[_Sized]) -> Iterable[bytes]:
    """Yield the pieces of a file's first bytes: length, JSON text, and spaces to a whole word."""
    pieces = [b'{"__metadata__":{"format":"pt"}']
    offset = 0
    for name, dtype, shape, size in tensors:
        end = offset + size
        sizes = ",".join(map(str, shape))
        pieces.append(
            f',{encode_basestring(name)}:{{"dtype":"{DTYPE_NAMES[dtype]}",'
            f'"shape":[{sizes}],"data_offsets":[{offset},{end}]}}'.encode()
        )
        offset = end
    pieces.append(b"}")
    length = sum(map(len, pieces))
    pieces.append(b" " * (-length % 8))
    yield (length + len(pieces[-1])).to_bytes(8, "little")
    yield from pieces
