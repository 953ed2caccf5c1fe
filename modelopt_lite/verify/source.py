"""Rules 2 and 8: nothing of the source is lost, and what is not quantized is unchanged."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

import torch

from modelopt_lite.checkpoint.dequant import DequantizedSource, Source
from modelopt_lite.checkpoint.header import TensorInfo
from modelopt_lite.checkpoint.sidecars import name_in_export, sidecar_files
from modelopt_lite.verify.config import tied
from modelopt_lite.verify.export import Export, Module, chunks
from modelopt_lite.verify.findings import Finding, shorten


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a module's matrix lies in the source.

    Attributes:
        tensor: The tensor on disk.
        expert: Which expert of a stack; None for a tensor of its own.
        position: Which of the matrices that are joined in the stack, of ``count``.
    """

    tensor: str
    expert: int | None = None
    position: int = 0
    count: int = 1


def find_origins(export: Export, source: Source) -> dict[str, Origin]:
    """Map each module of the export that has a counterpart in the source to it."""
    origins: dict[str, Origin] = {}
    for name, info in source.tensors.items():
        stem = name.removesuffix(".weight")
        if stem in export.modules:
            origins[stem] = Origin(name)
            continue
        for module, origin in _stacked_parts(export, name, info):
            origins[module] = origin
    return origins


def _stacked_parts(export: Export, name: str, info: TensorInfo) -> Iterator[tuple[str, Origin]]:
    """Yield each module that a stacked tensor of the source is taken apart into."""
    parent, _, leaf = name.removesuffix(".weight").rpartition(".")
    storage = export.storage
    container = storage.container_above(parent)
    if len(info.shape) != 3 or leaf not in storage.stacked_names or not storage.linear_names:
        return
    if container is None:
        return
    roles = storage.roles(leaf)
    for expert in range(info.shape[0]):
        for position, role in enumerate(roles):
            origin = Origin(name, expert, position, len(roles))
            yield f"{container}.{expert}.{role}", origin


def check_source(export: Export, source: Source, *, compare_bytes: bool) -> Iterator[Finding]:
    """Compare the export's tensors with the source's.

    Rules: ``source-missing``, ``source-extra``, ``source-shape``, ``source-dtype``,
    ``source-bytes``.
    """
    origins = find_origins(export, source)
    modules_of: dict[str, list[str]] = {}
    for part, origin in origins.items():
        modules_of.setdefault(origin.tensor, []).append(part)
    missing = []
    for name, info in source.tensors.items():
        written = export.tensors.get(name)
        module = export.modules.get(name.removesuffix(".weight"))
        if module is not None and module.packed:
            yield from _same_shape(export, module, info)
        elif written is not None:
            yield from _same_tensor(export, source, info, written, compare_bytes)
        elif name in modules_of:
            missing += _absent_parts(export, modules_of[name])
        elif not (tied(export.checkpoint.config) and name.endswith("lm_head.weight")):
            missing.append(name)
    if missing:
        yield Finding(
            "source-missing",
            f"{export.folder}: {shorten(missing)} of the source is nowhere in the export; export "
            "again",
        )
    yield from _extra(export, source, origins)


def _absent_parts(export: Export, names: list[str]) -> list[str]:
    return [f"{n}.weight" for n in names if n not in export.modules or not export.modules[n].weight]


def _same_shape(export: Export, module: Module, info: TensorInfo) -> Iterator[Finding]:
    shape = export.logical_shape(module)
    if export.format_of(module) is not None and shape != info.shape:
        yield Finding(
            "source-shape",
            f"{export.folder}: the codes of {module.name!r} stand for a matrix {list(shape)}, the "
            f"source has {list(info.shape)}; export again",
        )


def _same_tensor(
    export: Export, source: Source, info: TensorInfo, written: TensorInfo, compare_bytes: bool
) -> Iterator[Finding]:
    """Compare a tensor that is not quantized.

    A wider dtype that holds the same values is a warning; so is another value of a vector where
    the algorithm folds scales into norms.
    """
    if info.shape != written.shape:
        yield Finding(
            "source-shape",
            f"{written.file}: {info.name!r} has shape {list(written.shape)}, the source has "
            f"{list(info.shape)}; export again",
        )
    elif info.dtype != written.dtype:
        wider = torch.promote_types(info.dtype, written.dtype) == written.dtype
        harmless = wider and (not compare_bytes or _same_values(source, info, written))
        yield Finding(
            "source-dtype",
            f"{written.file}: {info.name!r} is {written.dtype}, the source has {info.dtype}; what "
            "is not quantized must stay as it is, export again",
            "warning" if harmless else "error",
        )
    elif compare_bytes and not _same_bytes(source, info, written):
        yield Finding(
            "source-bytes",
            f"{written.file}: {info.name!r} is not quantized, and its bytes differ from the "
            "source's; export again",
            "warning" if export.smoothed else "error",  # norms and routers take up scales
        )


def _same_values(source: Source, info: TensorInfo, written: TensorInfo) -> bool:
    if isinstance(source, DequantizedSource) and info.name in source.encoded:
        values = source.read(info.name).reshape(-1)
    else:
        values = torch.cat(list(chunks(info)))
    return torch.equal(values.to(written.dtype), torch.cat(list(chunks(written))))


def _same_bytes(source: Source, info: TensorInfo, written: TensorInfo) -> bool:
    if isinstance(source, DequantizedSource) and info.name in source.encoded:
        one = source.read(info.name).reshape(-1).view(torch.uint8)
        other = torch.cat([part.view(torch.uint8) for part in chunks(written)])
        return torch.equal(one, other)
    pairs = zip_longest(chunks(info), chunks(written))
    return all(
        a is not None and b is not None and torch.equal(a.view(torch.uint8), b.view(torch.uint8))
        for a, b in pairs
    )


def _extra(export: Export, source: Source, origins: dict[str, Origin]) -> Iterator[Finding]:
    known = set(source.tensors) | {scale.tensor.name for scale in export.kv_scales}
    known |= export.kv_biases
    for name in origins:
        module = export.modules.get(name)
        if module is not None:
            known.update(info.name for info in module.scales.values())
            known.update({module.weight.name} if module.weight else ())
    if tied(source.config) and not tied(export.checkpoint.config):
        known.add("lm_head.weight")  # a tie that was broken
    if extra := [name for name in export.tensors if name not in known]:
        yield Finding(
            "source-extra",
            f"{export.folder}: {shorten(extra)} comes from no tensor of the source; export again",
        )


def check_sidecars(folder: Path, source: Path) -> Iterator[Finding]:
    """Rules: ``sidecar-missing``, ``sidecar-bytes``: tokenizer, templates, code and the like."""
    for relative in sidecar_files(source):
        copied, original = folder / name_in_export(relative), source / relative
        if not copied.is_file():
            if name_in_export(relative) != relative:  # a card, which no engine reads
                continue
            yield Finding(
                "sidecar-missing", f"{copied}: does not exist, the source has it; copy it"
            )
        elif copied.stat().st_size != original.stat().st_size or not same_file(copied, original):
            yield Finding(
                "sidecar-bytes", f"{copied}: differs from the source's file; copy it unchanged"
            )


def same_file(one: Path, other: Path) -> bool:
    """Return whether two files have the same bytes, by reading both."""
    with one.open("rb") as a, other.open("rb") as b:
        while block := a.read(1 << 20):
            if block != b.read(1 << 20):
                return False
    return True
