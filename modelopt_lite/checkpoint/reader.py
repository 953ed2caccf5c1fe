"""A checkpoint folder, read tensor by tensor: headers first, bytes when asked for.

No shard is ever loaded or mapped as a whole: a tensor's bytes go from the file straight into
the host buffer that will hold them, so peak memory is that of the tensors asked for.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import json
import os
import reprlib
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from modelopt_lite.checkpoint.header import FileIdentity, TensorInfo, load_header
from modelopt_lite.checkpoint.table import TensorTable
from modelopt_lite.checkpoint.uncached import FLAG, UncachedReader
from modelopt_lite.errors import CheckpointError, InternalError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")
_MAX_READ = 1 << 30  # one preadv moves at most 2 GiB - 4 KiB on Linux


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        CheckpointError: The file is missing, unreadable, not JSON, or not an object.
    """
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{path}: no such file; give a folder that holds a complete checkpoint"
        ) from error
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror or error})") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not valid JSON ({error}); repair the file") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: holds a JSON {type(value).__name__}, not an object")
    return value


def cut_layer_types(config: dict[str, Any]) -> dict[str, Any]:
    """Return a config with every ``layer_types`` cut to its ``num_hidden_layers``.

    Published configs list extra prediction layers there, and strict readers reject that.
    """
    cut = {k: cut_layer_types(v) if isinstance(v, dict) else v for k, v in config.items()}
    count, kinds = cut.get("num_hidden_layers"), cut.get("layer_types")
    if isinstance(count, int) and isinstance(kinds, list):
        cut["layer_types"] = kinds[:count]
    return cut


class Checkpoint:
    """The tensors and the config of one checkpoint folder.

    Attributes:
        path: The folder.
        config: The contents of ``config.json``, or what was given to stand for it.
        tensors: Every tensor by its name on disk: files in name order, and within a file in the
            order of the bytes, so that reading them in turn reads the disk forward.
        notes: Oddities that were resolved without doubt: tensors of a named shard that the
            index does not name, and weight files beside the index; both are left unread.
        bytes_read: Bytes of tensor data read so far.
        reads: How often each tensor was read.
        uncached: Read past the page cache, for tensors that will be gone from it before they are
            read again. Set back to False where the file system cannot.

    Reads from several threads at once are safe. Files are opened at their first read and stay
    open until ``close``; a file that changes between is an error.

    Raises:
        CheckpointError: A missing or damaged config, index, shard or header.
    """

    def __init__(self, path: Path, config: dict[str, Any] | None = None) -> None:
        self.path = Path(path)
        if not self.path.is_dir():
            raise CheckpointError(f"{self.path}: no such folder; give a checkpoint folder")
        self.config = read_json(self.path / "config.json") if config is None else config
        self.notes: list[str] = []
        self.bytes_read = 0
        self.reads: Counter[str] = Counter()
        self._lock = threading.Lock()
        self.uncached = False
        self._past_cache = UncachedReader()
        self._fds: dict[tuple[Path, int], int] = {}
        self._identities: dict[Path, FileIdentity] = {}
        self._digests: dict[Path, str] = {}  # of headers
        self.tensors = self._find_tensors()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def total_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    @property
    def files(self) -> tuple[Path, ...]:
        """The weight files in name order."""
        return tuple(self._identities)

    def fingerprint(self) -> str:
        """Return a hash that changes when a weight file or ``config.json`` was touched.

        It covers each file's name, size, modification time and header, not the weights.
        """
        digest = hashlib.sha256(json.dumps(self.config, sort_keys=True).encode())
        for path, identity in self._identities.items():
            line = (path.name, identity.size, identity.mtime_ns, self._digests[path])
            digest.update(repr(line).encode())
        return digest.hexdigest()

    def read(self, name: str, out: Tensor | None = None) -> Tensor:
        """Read one tensor into host memory.

        Args:
            name: A key of ``tensors``.
            out: Where to put it: any tensor with as many elements. A contiguous host tensor of
                the stored dtype receives the bytes directly; any other is filled through a
                temporary copy with the usual conversion.

        Returns:
            ``out``, or a new tensor of the stored dtype and shape.

        Raises:
            CheckpointError: No such tensor, a read error, or the file changed.
            InternalError: ``out`` has another number of elements.
        """
        info = self.tensors.get(name)
        if info is None:
            raise CheckpointError(f"{self.path}: has no tensor {name!r}; see its index or header")
        if out is None:
            out = torch.empty(info.shape, dtype=info.dtype)
        check_out(out, info)
        direct = out.device.type == "cpu" and out.dtype == info.dtype and out.is_contiguous()
        target = out.detach() if direct else torch.empty(info.shape, dtype=info.dtype)
        if info.numel:
            self._read_bytes(info, byte_view(target))
        if not direct:
            out.detach().copy_(target.view(out.shape))
        with self._lock:
            self.bytes_read += info.nbytes
            self.reads[name] += 1
        return out

    def read_run(self, infos: Sequence[TensorInfo], out: Tensor) -> None:
        """Read tensors that follow one another in a file, with one request.

        Args:
            infos: Of ``tensors``, or parts of them; each begins where the one before it ends.
            out: Host memory, uint8 with the bytes of all of them.

        Raises:
            CheckpointError: As for `read`.
            InternalError: They do not follow one another, or ``out`` has another size.
        """
        for one, after in pairwise(infos):
            if (one.file, one.end) != (after.file, after.start):
                raise InternalError(f"{after.name!r} does not follow {one.name!r} in a file")
        first, end = infos[0], infos[-1].end
        if out.numel() != end - first.start:
            raise InternalError(f"{end - first.start} bytes to be read into {out.numel()}")
        if out.numel():
            self._read_bytes(first, byte_view(out))
        with self._lock:
            self.bytes_read += out.numel()
            self.reads.update(info.name for info in infos)

    def stored(self, name: str) -> tuple[TensorInfo, ...]:
        """See `DequantizedSource.stored`."""
        return (self.tensors[name],)

    def powers(self, name: str, input_major: bool) -> None:
        """See `DequantizedSource.powers`; nothing is decoded here."""

    def by_rows(self, name: str) -> bool:
        """See `DequantizedSource.by_rows`."""
        return True

    def read_rows(self, name: str, rows: range) -> Tensor:
        """Read some rows of a tensor, which lie one behind the other on disk.

        Raises:
            CheckpointError: See `read`.
        """
        info = self.tensors[name]
        size = info.nbytes // info.shape[0]
        begin = info.start + rows.start * size
        shape = (len(rows), *info.shape[1:])
        part = replace(info, shape=shape, start=begin, end=begin + len(rows) * size)
        out = torch.empty(shape, dtype=info.dtype)
        if part.numel:
            self._read_bytes(part, byte_view(out))
        with self._lock:
            self.bytes_read += part.nbytes
        return out

    def close(self) -> None:
        """Close the files; a later read opens them again."""
        self._past_cache.close()
        with self._lock:
            while self._fds:
                os.close(self._fds.popitem()[1])

    def _read_bytes(self, info: TensorInfo, buffer: memoryview) -> None:
        done = self._read_uncached(info, buffer) if self.uncached and FLAG else 0
        try:
            fd = self._open(info.file)
            while done < len(buffer):
                part = buffer[done : done + _MAX_READ]
                count = os.preadv(fd, [part], info.start + done)
                if not count:
                    raise self._changed(info.file)
                done += count
            # After the read: a change during it is seen, and one before it as well.
            if FileIdentity.of(os.fstat(fd)) != self._identities[info.file]:
                raise self._changed(info.file)
        except OSError as error:
            raise CheckpointError(
                f"{info.file}: reading tensor {info.name!r} failed at byte {info.start + done} "
                f"({error.strerror or error}); check the disk, then start again"
            ) from error

    def _read_uncached(self, info: TensorInfo, buffer: memoryview) -> int:
        """Read past the page cache what can be; the usual way finishes, and tells of errors."""
        try:
            return self._past_cache.read(self._open(info.file, FLAG), info.file, info.start, buffer)
        except OSError as error:
            if error.errno == errno.EINVAL:  # not on this file system
                self.uncached = False
            return 0

    def _open(self, path: Path, flag: int = 0) -> int:
        with self._lock:
            fd = self._fds.get((path, flag))
            if fd is None:
                fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | flag)
                if FileIdentity.of(os.fstat(fd)) != self._identities[path]:
                    os.close(fd)
                    raise self._changed(path)
                self._fds[path, flag] = fd
            return fd

    @staticmethod
    def _changed(path: Path) -> CheckpointError:
        return CheckpointError(
            f"{path}: changed since its header was read; leave the checkpoint unchanged during a "
            "run, then start again"
        )

    def _find_tensors(self) -> TensorTable:
        if (self.path / INDEX_FILE).exists():
            return self._indexed_tensors(_weight_map(self.path / INDEX_FILE))
        return TensorTable(self._header(self._single_file()).values())

    def _header(self, path: Path) -> dict[str, TensorInfo]:
        header = load_header(path)
        self._identities[path], self._digests[path] = header.identity, header.sha256
        return header.tensors

    def _single_file(self) -> Path:
        names = sorted(entry.name for entry in self.path.iterdir())
        weights = [name for name in names if name.endswith(".safetensors")]
        if SINGLE_FILE in weights:
            self._note_unread([name for name in weights if name != SINGLE_FILE])
            return self.path / SINGLE_FILE
        if len(weights) == 1:
            return self.path / weights[0]
        if weights:
            raise CheckpointError(
                f"{self.path}: holds {len(weights)} safetensors files ({', '.join(weights[:3])}, "
                f"…) but neither {SINGLE_FILE} nor {INDEX_FILE} to say which belong together; "
                "restore the index"
            )
        pickles = [name for name in names if name.endswith(_PICKLES)]
        if pickles:
            raise CheckpointError(
                f"{self.path}: holds only pickled weights ({', '.join(pickles[:3])}); convert "
                "them to safetensors, for example with from_pretrained and save_pretrained"
            )
        raise CheckpointError(
            f"{self.path}: holds no weights; expected {SINGLE_FILE} or {INDEX_FILE}"
        )

    def _indexed_tensors(self, weight_map: dict[str, str]) -> TensorTable:
        shards = sorted(set(weight_map.values()))
        tensors = TensorTable(self._named_tensors(shards, weight_map))
        for name, shard in weight_map.items():
            if name not in tensors:
                raise CheckpointError(
                    f"{self.path}: {INDEX_FILE} places tensor {name!r} in {shard}, which does not "
                    "hold it; repair the index or download the shard again"
                )
        strays = {entry.name for entry in self.path.glob("*.safetensors")} - set(shards)
        self._note_unread(sorted(strays))
        return tensors

    def _named_tensors(
        self, shards: Sequence[str], weight_map: dict[str, str]
    ) -> Iterator[TensorInfo]:
        """Yield what the index places in each shard and is there; note what else is there."""
        for shard in shards:
            if not (self.path / shard).exists():
                lost = next(name for name, file in weight_map.items() if file == shard)
                raise CheckpointError(
                    f"{self.path}: shard {shard}, named by {INDEX_FILE} for {lost!r}, is missing; "
                    "download or copy it"
                )
            for name, info in self._header(self.path / shard).items():
                if weight_map.get(name) == shard:
                    yield info
                else:
                    self.notes.append(
                        f"{shard} holds {name!r}, which the index does not place there"
                    )

    def _note_unread(self, names: list[str]) -> None:
        if names:
            self.notes.append(f"left unread, no part of the checkpoint: {', '.join(names)}")


def check_out(out: Tensor, info: TensorInfo) -> None:
    """Raise InternalError unless ``out`` can hold the tensor."""
    if out.numel() != info.numel or out.device.type == "meta":
        raise InternalError(
            f"tensor {info.name!r} of shape {list(info.shape)} cannot be read into a buffer of "
            f"shape {list(out.shape)} on {out.device}"
        )


def byte_view(tensor: Tensor) -> memoryview:
    """Return the bytes of a contiguous host tensor with at least one element, without a copy.

    Not by way of numpy, after which torch would refuse to resize the tensor's memory.
    """
    flat = tensor.detach().reshape(-1).view(torch.uint8)
    array = (ctypes.c_ubyte * flat.numel()).from_address(flat.data_ptr())
    array.tensor = flat  # type: ignore[attr-defined]  # lives as long as the view
    return memoryview(array).cast("B")


def _weight_map(path: Path) -> dict[str, str]:
    """Read an index and refuse everything that is not a plain file name beside it."""
    weight_map = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path}: has no weight_map; restore the index")
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or not _is_plain_name(shard):
            raise CheckpointError(
                f"{path}: places tensor {name!r} in {reprlib.repr(shard)}; only the plain name of "
                "a .safetensors file in the same folder is accepted, repair the index"
            )
    return weight_map


def _is_plain_name(shard: str) -> bool:
    return (
        shard.endswith(".safetensors")
        and shard.isprintable()
        and len(shard.encode()) <= 255  # the file systems' limit; a longer one could only fail
        and "/" not in shard
        and "\\" not in shard
    )
