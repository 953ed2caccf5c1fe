"""The disk tier: a model whose weights rest in the checkpoint's own files.

`open_from_disk` builds a model without weights and lets its parameters rest in place: those that
the file holds as the model wants them are views of the mapped file, the others are read on demand
(`LazyParameter`). No second copy is made on disk or in memory, and nothing is read before it is
used. A unit that is offloaded has its bytes read straight from the files into its block.
"""

from __future__ import annotations

import inspect
import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from modelopt_lite.checkpoint import TensorInfo
from modelopt_lite.checkpoint.dequant import DequantizedSource, Source, model_dtype, open_source
from modelopt_lite.checkpoint.fill import read_entries
from modelopt_lite.checkpoint.names import NameMap, TensorGroup, map_names
from modelopt_lite.errors import CheckpointError
from modelopt_lite.offload.device import as_bytes
from modelopt_lite.offload.diskblock import BlockSource, Part, base_of, drop
from modelopt_lite.offload.lazyparam import LazyParameter
from modelopt_lite.offload.store import of_experts

Model = TypeVar("Model", bound=nn.Module)

_ATTRIBUTE = "_modelopt_lite_disk"
_PAGE = mmap.PAGESIZE


@dataclass(slots=True)
class _Entry:
    """A parameter, or rows of one, at rest on disk. It is kept, so that its id stays its own."""

    parameter: Tensor
    target: str
    group: TensorGroup
    position: tuple[str, int]
    info: TensorInfo | None  # where a file holds its bytes as they are
    pointer: int
    version: int


@dataclass(slots=True)
class DiskWeights:
    """Where a model's weights lie on disk.

    Attributes:
        source: The checkpoint; its ``bytes_read`` and ``reads`` count what was read, by name on
            disk. What is read through a mapped file is not counted.
    """

    source: Source
    _entries: dict[int, _Entry] = field(default_factory=dict)

    def covers(self, tensor: Tensor) -> bool:
        """Whether a tensor's values can be read from disk: it rests there, unchanged."""
        entry = self._entries.get(id(tensor))
        if entry is None:
            return False
        if isinstance(tensor, LazyParameter):
            return tensor.at_rest
        same = tensor.data_ptr() == entry.pointer and tensor._version == entry.version
        return same and not _written(tensor)

    def block(self, tensors: Sequence[Tensor], offsets: Sequence[int]) -> BlockSource:
        """Return the source of a block.

        Args:
            tensors: In the order of the offsets, at rest. What `covers` does not know is copied
                from memory.
            offsets: Bytes from the beginning of the block.
        """
        parts = []
        for at, (tensor, offset) in enumerate(zip(tensors, offsets, strict=True)):
            entry = self._entries[id(tensor)] if self.covers(tensor) else None
            if entry is None:
                parts.append(Part(offset, tensor.detach(), f"#{at}", None, None, ("", at)))
            else:
                like = self.resting(tensor)
                place = (entry.group, entry.info, entry.position, entry.version)
                parts.append(Part(offset, like, entry.target, *place))
        return BlockSource(self.source, parts)

    def places(self, tensors: Sequence[Tensor]) -> list[TensorInfo | None]:
        """Return where files hold the bytes of tensors as they are, of those that rest there."""
        return [self._entries[id(t)].info if self.covers(t) else None for t in tensors]

    def can_split(self, parameter: nn.Parameter) -> bool:
        """Whether rows of a parameter at rest can be read by themselves."""
        entry = self._entries[id(parameter)]
        pieces = entry.group.pieces
        by_row = all(p.region and isinstance(p.region[0], int) for p in pieces)
        return entry.info is not None or (entry.group.convert is None and bool(pieces) and by_row)

    def rows(self, parameter: nn.Parameter, rows: range) -> Tensor:
        """Return rows of a parameter that `can_split`, as a tensor of its own, at rest."""
        entry = self._entries[id(parameter)]
        made = self.resting(parameter)[rows.start : rows.stop]
        info, group = entry.info, entry.group
        if info is not None:
            row = info.nbytes // parameter.shape[0]
            begin, end = (info.start + at * row for at in (rows.start, rows.stop))
            info = replace(info, shape=tuple(made.shape), start=begin, end=end)
        else:
            group = of_experts(group, rows)
        known = (entry.target, group, entry.position, info, made.data_ptr(), made._version)
        self._entries[id(made)] = _Entry(made, *known)
        return made

    def resting(self, tensor: Tensor) -> Tensor:
        """Return the data that a tensor has at rest, without reading it."""
        return tensor.resting if isinstance(tensor, LazyParameter) else tensor.detach()

    def load(self, tensor: Tensor) -> Tensor:
        """Read a tensor's values into new memory."""
        entry = self._entries[id(tensor)]
        like = self.resting(tensor)
        value = torch.empty(like.shape, dtype=like.dtype)
        if entry.info is not None:
            base_of(self.source).read_run([entry.info], as_bytes(value))
            return value
        read_entries(entry.group, self.source.read, {entry.target: value}, keep=drop)
        return value

    def read_uncached(self) -> None:
        """From now on read past the page cache, which does not hold the model from pass to pass."""
        base_of(self.source).uncached = True

    def drop_cache(self) -> None:
        """Ask the system to forget the files' pages, so that the next read is from the disk."""
        for path in base_of(self.source).files:
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        """Close the files; a later read opens them again."""
        self.source.close()

    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        """A copy of the model, and a pickled one, has its weights in memory."""
        return _nowhere, ()


def disk_weights(model: nn.Module) -> DiskWeights | None:
    """Return where the weights of a model from `open_from_disk` lie; None for any other model."""
    found = model.__dict__.get(_ATTRIBUTE)
    return found if isinstance(found, DiskWeights) else None


def open_from_disk(
    model: Model | Callable[..., Model],
    folder: Path | str,
    *,
    dtype: torch.dtype | None = None,
) -> Model:
    """Build a model whose weights stay in the files of a checkpoint.

    The model runs as it is, reading through the page cache; `offload` is what reads ahead and keeps
    memory bounded. The files must not change while the model lives.

    Args:
        model: A class of transformers, built from the folder's config; any function without
            arguments that returns a module; or a module on the meta device, which is filled in
            place (its buffers must be real).
        folder: With safetensors files and, for a class of transformers, ``config.json``.
        dtype: Of a transformers model. None: what its config says.

    Returns:
        The model, in eval mode, no parameter with a gradient. Its ``state_dict`` has the true
        values at all times.

    Raises:
        CheckpointError: Files are missing or damaged, or hold another model's weights.
    """
    named = hasattr(model, "_from_config") or hasattr(model, "from_config")
    without = not named and not (Path(folder) / "config.json").exists()
    source = open_source(Path(folder), {} if without else None)
    built: Any = model if isinstance(model, nn.Module) else _build(model, source, dtype)
    with _declared_ties(built):
        names = map_names(built, {name: info.shape for name, info in source.tensors.items()})
    weights = DiskWeights(source)
    _Filler(built, source, names, weights).fill()
    built.__dict__[_ATTRIBUTE] = weights
    built.requires_grad_(False)
    built.eval()
    return built  # type: ignore[no-any-return]


class _Filler:
    """Puts parameters at rest on disk in the place of those on meta."""

    def __init__(
        self, model: nn.Module, source: Source, names: NameMap, weights: DiskWeights
    ) -> None:
        self._model = model
        self._source = source
        self._names = names
        self._weights = weights
        self._files: dict[Path, np.ndarray[Any, np.dtype[np.uint8]]] = {}
        self._made: dict[str, nn.Parameter] = {}

    def fill(self) -> None:
        """Fill every entry of the state, tied ones with one parameter."""
        state = self._model.state_dict(keep_vars=True)
        for name, blank in state.items():
            target = self._names.resolve(name)
            group = self._names.by_target.get(target)
            path, _, leaf = name.rpartition(".")
            module = self._model.get_submodule(path)
            if group is None:
                if blank.device.type == "meta":
                    raise CheckpointError(f"no tensor of the checkpoint gives {name!r}")
            elif isinstance(blank, nn.Parameter):
                if target not in self._made:
                    self._made[target] = self._parameter(target, blank, group)
                module._parameters[leaf] = self._made[target]
            else:
                value = torch.empty(blank.shape, dtype=blank.dtype)
                read_entries(group, self._source.read, {target: value}, keep=drop)
                module._buffers[leaf] = value
        self._check_buffers()

    def _parameter(self, target: str, blank: nn.Parameter, group: TensorGroup) -> nn.Parameter:
        info = self._source.tensors[group.sources[0]]
        position = (str(info.file), info.start)
        source = self._source
        view = self._view(info, blank, group)
        made: nn.Parameter
        if view is not None:
            made = nn.Parameter(view, requires_grad=False)
        else:

            def read(out: Tensor) -> None:
                read_entries(group, source.read, {target: out}, keep=drop)

            made = LazyParameter.make(blank.shape, blank.dtype, read)
        pointer = 0 if view is None else made.data_ptr()
        self._weights._entries[id(made)] = _Entry(
            made,
            target,
            group,
            position,
            info if view is not None else None,
            pointer,
            made._version,
        )
        return made

    def _view(self, info: TensorInfo, blank: Tensor, group: TensorGroup) -> Tensor | None:
        """Return the file's own bytes as a tensor, where they are what the model wants."""
        as_it_is = group.convert is None and len(group.pieces) == 1 and not group.pieces[0].region
        decoded = isinstance(self._source, DequantizedSource) and info.name in self._source.encoded
        aligned = info.start % info.dtype.itemsize == 0
        same = info.dtype == blank.dtype and info.shape == tuple(blank.shape)
        if not (as_it_is and aligned and same) or decoded or not info.numel:
            return None
        raw = self._mapped(info.file)[info.start : info.end]
        return torch.from_numpy(raw).view(info.dtype).view(info.shape)

    def _mapped(self, path: Path) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """Map a file: private, so that a change in memory never reaches the disk."""
        if path not in self._files:
            flags = mmap.MAP_PRIVATE | getattr(mmap, "MAP_NORESERVE", 0)
            with path.open("rb") as file:
                self._files[path] = np.frombuffer(mmap.mmap(file.fileno(), 0, flags), np.uint8)
        return self._files[path]

    def _check_buffers(self) -> None:
        for name, buffer in self._model.named_buffers():
            if buffer.device.type == "meta":
                raise CheckpointError(
                    f"the buffer {name!r} is on the meta device and no tensor of the checkpoint "
                    "gives it; build the model with accelerate.init_empty_weights("
                    "include_buffers=False), or give open_from_disk the class"
                )


def _build(model: Callable[..., Model], source: Source, dtype: torch.dtype | None) -> Model:
    """Build a model with its parameters on meta."""
    with parameters_on_meta():
        if not hasattr(model, "_from_config") and not hasattr(model, "from_config"):
            made = model()
        else:
            dtype = dtype or model_dtype(source.config)
            config = _transformers_config(model, source)
            build = getattr(model, "_from_config", None) or model.from_config  # type: ignore[attr-defined]
            made = build(config, dtype=dtype)
    return made


def _transformers_config(model: Any, source: Source) -> Any:
    config_class = getattr(model, "config_class", None)
    if config_class is not None:
        return config_class.from_dict(source.config)
    from transformers import AutoConfig

    fields = dict(source.config)
    if fields.get("model_type") is None:
        raise CheckpointError(f"{source.path / 'config.json'} has no model_type; give the class")
    return AutoConfig.for_model(fields.pop("model_type"), **fields)


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Let modules that are made inside have their parameters on meta; buffers are real.

    ``accelerate.init_empty_weights(include_buffers=False)`` does the same but for a parameter that
    two modules share, which it makes two of.
    """
    register = nn.Module.register_parameter

    def on_meta(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        register(self, name, param)
        if param is not None and param.device.type != "meta":
            arguments = {"requires_grad": param.requires_grad}
            kept = {k: v for k, v in vars(param).items() if k in _accepted(type(param))}
            made = type(param)(param.to("meta"), **arguments, **kept)
            self._parameters[name] = made

    nn.Module.register_parameter = on_meta  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def _accepted(kind: type) -> set[str]:
    return set(inspect.signature(kind.__new__).parameters) - {"cls", "data", "requires_grad"}


@contextmanager
def _declared_ties(model: nn.Module) -> Iterator[None]:
    """Tell `map_names` of parameters that a model other than transformers' has under two names."""
    if hasattr(model, "all_tied_weights_keys") or hasattr(model, "_tied_weights_keys"):
        yield
        return
    first: dict[int, str] = {}
    ties = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        known = first.setdefault(id(parameter), name)
        if known != name:
            ties[name] = known
    model.__dict__["all_tied_weights_keys"] = ties
    try:
        yield
    finally:
        del model.__dict__["all_tied_weights_keys"]


def _nowhere() -> None:
    """Return what a copied model has in the place of `DiskWeights`."""


def _written(tensor: Tensor) -> bool:
    """Whether memory of a mapped tensor was written to: its pages are then the process's own.

    Where the system does not tell (Linux's /proc/self/pagemap does, bit 61), the tensor's version
    is all there is to go by.
    """
    if not tensor.numel():
        return False
    first = tensor.data_ptr() // _PAGE
    count = (tensor.data_ptr() + tensor.nbytes - 1) // _PAGE - first + 1
    try:
        with Path("/proc/self/pagemap").open("rb", buffering=0) as file:
            file.seek(first * 8)
            flags = np.frombuffer(file.read(count * 8), np.uint64)
    except OSError:
        return False
    there = (flags >> np.uint64(62)) > 0  # present or swapped
    of_file = (flags >> np.uint64(61)) & np.uint64(1)
    return bool((there & (of_file == 0)).any())
