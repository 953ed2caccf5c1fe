"""Open an export, whatever its dialect, and the rules that its configs must keep."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from modelopt_lite.checkpoint.dequant import model_dtype
from modelopt_lite.checkpoint.reader import Checkpoint
from modelopt_lite.dialects.base import Stated
from modelopt_lite.dialects.compressed_tensors import CompressedTensors
from modelopt_lite.dialects.known import DIALECTS, dialect_of
from modelopt_lite.dialects.modelopt import ModelOpt
from modelopt_lite.errors import CheckpointError
from modelopt_lite.verify import compressed, config
from modelopt_lite.verify.cache import check_kv_config
from modelopt_lite.verify.excludes import check_excludes, check_towers
from modelopt_lite.verify.export import Export, read_export
from modelopt_lite.verify.findings import Finding
from modelopt_lite.verify.mixed import check_mixed

Check = Callable[[Export], Iterator[Finding]]


@dataclass(frozen=True, slots=True)
class Opened:
    """An export, and what remains to be checked of its configs.

    Attributes:
        export: Its modules.
        check: Compares the configs with the modules; None where no config could be read.
        findings: What is wrong with the configs by themselves.
    """

    export: Export
    check: Check | None
    findings: list[Finding]


def export_folders(folder: Path) -> list[Path]:
    """Return the exports of a folder: itself, or those of one run in several dialects."""
    if (folder / "config.json").exists():
        return [folder]
    return [p for name in DIALECTS if (p := folder / name).is_dir()] or [folder]


def open_modules(checkpoint: Checkpoint) -> Opened:
    """Read the configs, and sort the tensors into modules of the formats that they name."""
    section = checkpoint.config.get("quantization_config")
    try:
        dtype = model_dtype(checkpoint.config)
    except CheckpointError:  # a config that states none that a model runs in: found elsewhere
        dtype = torch.float32
    dialect = dialect_of(section if isinstance(section, dict) else {}, dtype)
    stated, check, findings = _READERS[dialect.name](checkpoint)
    return Opened(read_export(checkpoint, stated, dialect), check, findings)


def _read_modelopt(checkpoint: Checkpoint) -> tuple[Stated, Check | None, list[Finding]]:
    read, findings = config.read_configs(checkpoint)
    stated = config.declared_formats(checkpoint, read)
    if read is None:
        return stated, None, findings

    def check(export: Export) -> Iterator[Finding]:
        yield from config.check_algo(export, read)
        yield from config.check_group_size(export, read)
        yield from check_excludes(export, read)
        yield from check_towers(export)
        yield from check_kv_config(export, read)
        yield from check_mixed(export, read)

    return stated, check, findings


def _read_compressed(checkpoint: Checkpoint) -> tuple[Stated, Check | None, list[Finding]]:
    stated, findings = compressed.read_schemes(checkpoint)
    return stated, lambda export: compressed.check_schemes(export, stated), findings


_READERS: dict[str, Callable[[Checkpoint], tuple[Stated, Check | None, list[Finding]]]] = {
    ModelOpt.name: _read_modelopt,
    CompressedTensors.name: _read_compressed,
}
