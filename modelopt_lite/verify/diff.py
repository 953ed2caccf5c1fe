"""What differs between two checkpoints: tensors, configs and the files beside them.

Tensors are compared a mebibyte at a time; where codes or scales of a matrix differ, it is decoded
on both sides, one matrix at a time, to tell by how much.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from modelopt_lite.checkpoint.dequant import Source, open_source
from modelopt_lite.checkpoint.header import TensorInfo
from modelopt_lite.checkpoint.reader import Checkpoint, read_json
from modelopt_lite.checkpoint.sidecars import sidecar_files
from modelopt_lite.errors import CheckpointError
from modelopt_lite.formats.base import row_chunks
from modelopt_lite.jsons import finite
from modelopt_lite.verify.export import Export, chunks
from modelopt_lite.verify.opening import open_modules
from modelopt_lite.verify.source import same_file

Kind = Literal["only in A", "only in B", "dtype", "shape", "values"]
_CONFIGS = ("config.json", "hf_quant_config.json")
_INTS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class TensorDifference:
    """A tensor that is not the same on both sides.

    Attributes:
        name: The tensor.
        kind: How it differs; "dtype" and "shape" come before "values".
        a: Dtype and shape in A, None where it is not there.
        b: The same in B.
        differing: How many elements differ, of those with the same dtype and shape.
        elements: How many there are.
    """

    name: str
    kind: Kind
    a: str | None
    b: str | None
    differing: int | None = None
    elements: int | None = None


@dataclass(frozen=True, slots=True)
class ValueDifference:
    """A matrix, or another tensor, whose values differ, decoded where it is quantized.

    Attributes:
        name: The module, or the tensor.
        largest: Largest absolute difference of an element.
        relative: Root of the summed squared differences over that of A's squares.
    """

    name: str
    largest: float
    relative: float


@dataclass(frozen=True, slots=True)
class Difference:
    """What differs between A and B.

    Attributes:
        tensors: Tensors, as they are stored.
        values: What they stand for, the largest relative difference first.
        configs: ``file: path in it`` -> values in A and B.
        files: Other files -> "only in A", "only in B" or "bytes".
        undecoded: Why values were not compared; None where they were.
    """

    tensors: list[TensorDifference] = field(default_factory=list)
    values: list[ValueDifference] = field(default_factory=list)
    configs: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    undecoded: str | None = None

    @property
    def found(self) -> bool:
        """Whether anything differs."""
        return bool(self.tensors or self.configs or self.files)

    def as_dict(self) -> dict[str, Any]:
        """Return it as JSON holds it, which has no infinity and no NaN."""
        return {"differ": self.found, **finite(asdict(self))}


def diff(a: Path, b: Path) -> Difference:
    """Compare two checkpoints; how tensors are spread over files is left out.

    Raises:
        CheckpointError: One of them cannot be read.
    """
    with Checkpoint(a) as one, Checkpoint(b) as other:
        tensors = list(_tensors(one, other))
        values, undecoded = _values(one, other, [t for t in tensors if t.kind != "only in B"])
    return Difference(tensors, values, dict(_configs(a, b)), dict(_files(a, b)), undecoded)


def _tensors(one: Checkpoint, other: Checkpoint) -> Iterator[TensorDifference]:
    for name in sorted(one.tensors.keys() | other.tensors.keys()):
        a, b = one.tensors.get(name), other.tensors.get(name)
        if a is None or b is None:
            yield TensorDifference(name, "only in B" if a is None else "only in A", _is(a), _is(b))
        elif a.dtype != b.dtype or a.shape != b.shape:
            kind: Kind = "dtype" if a.dtype != b.dtype else "shape"
            yield TensorDifference(name, kind, _is(a), _is(b))
        elif count := sum(
            int((x.view(_INTS[x.itemsize]) != y.view(_INTS[y.itemsize])).sum())
            for x, y in zip(chunks(a), chunks(b), strict=True)
        ):
            yield TensorDifference(name, "values", _is(a), _is(b), count, a.numel)


def _is(info: TensorInfo | None) -> str | None:
    if info is None:
        return None
    return f"{str(info.dtype).removeprefix('torch.')} {list(info.shape)}"


def _values(
    one: Checkpoint, other: Checkpoint, differing: list[TensorDifference]
) -> tuple[list[ValueDifference], str | None]:
    """Decode what differs, where both sides have it in the same shape."""
    if not differing:
        return [], None
    try:
        with closing(open_source(one.path)) as a, closing(open_source(other.path)) as b:
            names = _presented(open_modules(one).export, [t.name for t in differing])
            found = [_value(name, a, b) for name in names if _comparable(name, a, b)]
    except CheckpointError as error:
        return [], str(error)
    return sorted((d for d in found if d.largest), key=lambda d: -d.relative), None


def _presented(export: Export, names: list[str]) -> list[str]:
    """The matrices and other tensors that stored ones belong to, each once."""
    owners = {}
    for module in export.modules.values():
        for info in (*module.scales.values(), *([module.weight] if module.weight else ())):
            weight = module.name if module.stacked else f"{module.name}.weight"
            owners[info.name] = module.weight.name if module.weight else weight
    return list(dict.fromkeys(owners.get(name, name) for name in names))


def _comparable(name: str, a: Source, b: Source) -> bool:
    one, other = a.tensors.get(name), b.tensors.get(name)
    return one is not None and other is not None and one.shape == other.shape


def _value(name: str, a: Source, b: Source) -> ValueDifference:
    one, other = (source.read(name) for source in (a, b))
    one, other = (t.reshape(-1, t.shape[-1] if t.ndim else 1) for t in (one, other))
    largest = errors = whole = 0.0
    for rows in row_chunks(one):
        x, y = one[rows].double(), other[rows].double()
        error = (y - x).abs()
        largest = max(largest, float(error.amax())) if error.numel() else largest
        errors += float(error.square().sum())
        whole += float(x.square().sum())
    if math.isnan(errors):  # max() passes NaN over
        largest = math.nan
    return ValueDifference(name, largest, (errors / whole) ** 0.5 if whole else errors**0.5)


def _configs(a: Path, b: Path) -> Iterator[tuple[str, tuple[Any, Any]]]:
    for name in _CONFIGS:
        sides = [_flat(read_json(p)) if (p := f / name).exists() else {} for f in (a, b)]
        for key in sorted(sides[0].keys() | sides[1].keys()):
            pair = (sides[0].get(key), sides[1].get(key))
            if pair[0] != pair[1]:
                yield f"{name}: {key}", pair


def _flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A config with dotted names for what is nested."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, dict) and value:
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _files(a: Path, b: Path) -> Iterator[tuple[str, str]]:
    one, other = (set(sidecar_files(folder)) for folder in (a, b))
    for file in sorted(one | other):
        if file not in other or file not in one:
            yield str(file), "only in A" if file in one else "only in B"
        elif not same_file(a / file, b / file):
            yield str(file), "bytes"
