"""Safetensors headers, parsed by hand: where each tensor lies, with nothing of the data read.

A file is an 8-byte little-endian header length, a JSON header, and the tensors' bytes back to
back. The header comes from strangers, so every number in it is checked before it is used, and
nothing is allocated beyond the header that is really in the file.

Source: the format section of the safetensors README (github.com/huggingface/safetensors).
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import reprlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from modelopt_lite.errors import CheckpointError

MAX_HEADER_BYTES = 100_000_000  # the limit of the reference implementation
_MAX_DIMS = 64  # torch's own limit; keeps the product of a hostile shape cheap
_MAX_DIM = 2**63

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
# torch 2.6, the oldest release that we allow, has no E8M0; such a tensor is then an unknown dtype.
if hasattr(torch, "float8_e8m0fnu"):
    DTYPES["F8_E8M0"] = torch.float8_e8m0fnu
DTYPE_NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}


def itemsize(dtype: torch.dtype) -> int:
    """Return the bytes of one element."""
    return dtype.itemsize


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of a checkpoint: what it is and where its bytes lie.

    ``start`` and ``end`` are offsets from the beginning of ``file``. ``end - start == nbytes`` for
    a tensor that is stored as it is presented; a source that decodes on reading gives the place
    of the stored codes, and then the two differ.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    file: Path
    start: int
    end: int

    @property
    def numel(self) -> int:
        """Number of elements; 1 for a 0-d tensor."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the presented tensor."""
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class FileIdentity:
    """What must not change while a file is being read."""

    device: int
    inode: int
    size: int
    mtime_ns: int

    @classmethod
    def of(cls, stat: os.stat_result) -> FileIdentity:
        """Take the identity out of a stat result."""
        return cls(stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns)


@dataclass(frozen=True, slots=True)
class Header:
    """A checked header: its tensors in file order, its digest, and the file that it came from."""

    tensors: dict[str, TensorInfo]
    sha256: str
    identity: FileIdentity


def read_header(path: Path) -> dict[str, TensorInfo]:
    """Return the tensors of a safetensors file in the order of their bytes.

    Raises:
        CheckpointError: The file is missing, unreadable, truncated, or breaks the format; the
            message names the file and the remedy.
    """
    return load_header(path).tensors


def load_header(path: Path) -> Header:
    """Read and check a header; see ``read_header`` for what is raised."""
    try:
        with path.open("rb") as file:
            identity = FileIdentity.of(os.fstat(file.fileno()))
            start = file.read(8)
            length = _header_length(path, start, identity.size)
            raw = file.read(length)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror or error})") from error
    if len(raw) != length:
        raise CheckpointError(
            f"{path}: the file shrank while its header was read; leave the checkpoint unchanged "
            "during a run"
        )
    tensors = _tensors(path, _parse(path, raw), 8 + length)
    _check_layout(path, tensors, 8 + length, identity.size)
    return Header({t.name: t for t in tensors}, hashlib.sha256(raw).hexdigest(), identity)


def _damaged(path: Path, what: str) -> CheckpointError:
    return CheckpointError(f"{path}: {what}; the file is damaged, download or save it again")


def _header_length(path: Path, start: bytes, file_size: int) -> int:
    if start == b"version ":
        raise CheckpointError(
            f"{path}: this is a git-lfs pointer, not the weights; run `git lfs pull` in its folder"
        )
    if len(start) < 8:
        raise _damaged(path, f"has {len(start)} bytes, a safetensors file has at least 8")
    length = int.from_bytes(start, "little")
    if length > MAX_HEADER_BYTES:
        raise _damaged(path, f"claims a header of {length} bytes, the limit is {MAX_HEADER_BYTES}")
    if 8 + length > file_size:
        raise _damaged(path, f"needs {8 + length} bytes for its header but has {file_size}")
    return length


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a key occurs twice in one object")
    return result


def _parse(path: Path, raw: bytes) -> dict[str, Any]:
    try:
        header = json.loads(raw.decode("utf-8"), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:  # also bad UTF-8 and integers without end
        raise _damaged(path, f"the header is not valid JSON ({str(error)[:200]})") from error
    if not isinstance(header, dict):
        raise _damaged(path, f"the header is a JSON {type(header).__name__}, not an object")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict):
        raise _damaged(path, "__metadata__ is not an object")
    return header


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < _MAX_DIM  # bool is an int, and no count


def _tensors(path: Path, header: dict[str, Any], data_start: int) -> list[TensorInfo]:
    """Check each entry by itself; return them in the order of their bytes."""
    tensors = []
    for name, entry in header.items():
        if not name.isprintable() or not name:  # lone surrogates, NUL and newlines among others
            raise _damaged(path, f"a tensor has the unprintable name {reprlib.repr(ascii(name))}")
        if not isinstance(entry, dict):
            raise _damaged(path, f"the entry of tensor {name!r} is not an object")
        code = entry.get("dtype")
        dtype = DTYPES.get(code) if isinstance(code, str) else None
        if dtype is None:
            raise CheckpointError(
                f"{path}: tensor {name!r} has the unknown dtype {reprlib.repr(code)}; "
                f"known: {', '.join(DTYPES)}. Convert the checkpoint to one of them"
            )
        shape, offsets = entry.get("shape"), entry.get("data_offsets")
        if not isinstance(shape, list) or len(shape) > _MAX_DIMS or not all(map(_is_count, shape)):
            raise _damaged(path, f"tensor {name!r} has the impossible shape {reprlib.repr(shape)}")
        if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_count, offsets)):
            raise _damaged(path, f"tensor {name!r} has the data_offsets {reprlib.repr(offsets)}")
        begin, end = offsets
        info = TensorInfo(name, dtype, tuple(shape), path, data_start + begin, data_start + end)
        if end - begin != info.nbytes:
            raise _damaged(
                path,
                f"tensor {name!r} of shape {shape} and dtype {code} needs "
                f"{info.nbytes} bytes but its data_offsets {offsets} hold {end - begin}",
            )
        tensors.append(info)
    return sorted(tensors, key=lambda tensor: (tensor.start, tensor.end))


def _check_layout(path: Path, tensors: list[TensorInfo], data_start: int, file_size: int) -> None:
    """The tensors must fill the file from the header to its end without a gap or an overlap."""
    position = data_start
    for tensor in tensors:
        if tensor.start != position:
            kind = "overlaps the tensor before it" if tensor.start < position else "leaves a hole"
            raise _damaged(
                path,
                f"tensor {tensor.name!r} starts at byte {tensor.start} instead of {position} "
                f"and {kind}",
            )
        position = tensor.end
    if position > file_size:
        raise CheckpointError(
            f"{path}: truncated, its header describes {position} bytes but the file has "
            f"{file_size}; download or save it again"
        )
    if position < file_size:
        raise _damaged(
            path, f"has {file_size} bytes but its header describes only {position} of them"
        )
