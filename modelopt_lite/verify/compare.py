"""Rule 7: dequantized, the export is its source, within the error that its format allows."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from modelopt_lite.checkpoint.dequant import DequantizedSource, Source, open_source
from modelopt_lite.checkpoint.header import TensorInfo
from modelopt_lite.checkpoint.reader import Checkpoint
from modelopt_lite.errors import CheckpointError
from modelopt_lite.formats.base import row_chunks
from modelopt_lite.formats.declared import same_shape
from modelopt_lite.formats.errors import ErrorReport, ErrorSums
from modelopt_lite.formats.linear import FORMATS, LinearFormat, measure_error
from modelopt_lite.models.specs import ExpertStorageSpec
from modelopt_lite.select import oriented
from modelopt_lite.verify.export import Export, Module
from modelopt_lite.verify.findings import Finding
from modelopt_lite.verify.opening import open_modules
from modelopt_lite.verify.source import Origin, find_origins

# llm-compressor rounds scales to 16 bits after it divided by them: values move by up to 2**-8 of
# themselves, and the largest by up to a ninth of half a step of FP8, whose steps are finest.
_SHORT_SCALES = 1.125


def compare_with_source(folder: Path, source: Path) -> dict[str, ErrorReport]:
    """Reread an export and its source, and measure each packed module's error.

    One matrix (or stack, where the export keeps one) is in memory at a time; where the source
    stores stacked experts as codes, the decoded stack is, too. Modules whose tensors are
    incomplete or do not fit the source are left out: `audit` names them.

    Args:
        folder: The export.
        source: What it was made from.

    Returns:
        Module -> report; ``worst`` above 1 or NaN is an error of the export.

    Raises:
        CheckpointError: A folder cannot be read, or the export's format is not one of ours.
    """
    checkpoint = Checkpoint(folder)
    export = open_modules(checkpoint).export
    packed = list(export.packed())
    if packed and not any(export.format_of(module) for module in packed):
        raise CheckpointError(
            f"{folder}: quant_algo {export.algo!r} cannot be dequantized here; compare an export "
            f"in one of {', '.join(sorted({f.quant_algo for f in FORMATS.values()}))}"
        )
    with checkpoint, open_source(source) as original:
        return dict(measure(export, original))


def measure(export: Export, source: Source) -> Iterator[tuple[str, ErrorReport]]:
    """Yield the report of each packed module that has a matrix in the source."""
    reader = _SourceReader(source, export.storage)
    decoded = _decoded(export)
    for name, origin in find_origins(export, source).items():
        module = export.modules.get(name)
        if module is None or not module.packed:
            continue
        fmt = export.format_of(module)
        if fmt is None:
            if decoded is not None and f"{name}.weight" in decoded.tensors:
                w, read = reader.matrix(origin), decoded.read(f"{name}.weight")
                if w.shape == read.shape:
                    yield name, _without_bound(w, read)
            continue
        if not _complete(export, module, fmt):
            continue
        w = reader.matrix(origin)
        if tuple(w.shape) != export.logical_shape(module):
            continue
        turned = export.is_turned(module)
        # The wider of the two bounds: an export does not say which arithmetic made it.
        yield (
            name,
            measure_error(
                fmt,
                w,
                _read(export, module, fmt),
                numerics="modelopt",
                turned=turned,
                angle=True,
            ),
        )


def _decoded(export: Export) -> Source | None:
    """The export as a source: it reads more formats than this package writes."""
    if all(export.format_of(module) for module in export.packed()):
        return None
    try:
        return open_source(export.folder)
    except CheckpointError:  # nor does it read this one
        return None


def _without_bound(w_RK: Tensor, value_RK: Tensor) -> ErrorReport:
    """Measure what no bound is known for, a few rows at a time."""
    sums = ErrorSums(angle=True)
    for rows in row_chunks(w_RK):
        # Copied, as they are overwritten.
        sums.add(w_RK[rows].float(), value_RK[rows].to(torch.float32, copy=True))
    return sums.report()


def check_errors(
    export: Export, source: Source, reports: dict[str, ErrorReport]
) -> Iterator[Finding]:
    """Rule ``weight-error``: no value is further from its source than its format allows.

    Where weights hold scales of their inputs, or were rounded for what products lose, they may be
    further away: there it is a warning. ``reports`` takes up what was measured.
    """
    searched = export.smoothed or export.method != "max"
    for name, report in measure(export, source):
        reports[name] = report
        module = export.modules[name]
        scale = module.scales.get("weight_scale")
        short = scale is not None and scale.dtype in (torch.bfloat16, torch.float16)
        if math.isnan(report.worst) or report.worst > (_SHORT_SCALES if short else 1):
            scaled = " (or the search that chose its values)" if searched else ""
            yield Finding(
                "weight-error",
                f"{export.folder}: {name!r} is up to {report.worst:.3g} times as far from the "
                f"source as its format allows (relative error {report.relative:.3g}); wrong "
                f"scales or another source{scaled}, export again",
                "warning" if searched else "error",
            )


def _complete(export: Export, module: Module, fmt: LinearFormat) -> bool:
    shape = export.logical_shape(module)
    turned = export.is_turned(module)
    if fmt.problem(shape, stacked_input_major=turned):
        return False
    have = {**module.scales, **({"weight": module.weight} if module.weight else {})}
    wanted = {export.dialect.part_of(s.suffix): s for s in export.wanted(fmt, shape, turned)}
    return all(
        (info := have.get(part)) is not None
        and info.dtype == spec.dtype
        and same_shape(info.shape, spec.shape)
        for part, spec in wanted.items()
        if part != "input_scale"
    )


def _read(export: Export, module: Module, fmt: LinearFormat) -> dict[str, Tensor]:
    infos = {k: v for k, v in module.scales.items() if k.startswith("weight_scale")}
    if module.weight is not None:
        infos["weight"] = module.weight
    read = {k: export.checkpoint.read(info.name) for k, info in infos.items()}
    return export.dialect.decode(fmt, read)


class _SourceReader:
    """Reads matrices out of the source; of a stack no more than one expert where it can."""

    def __init__(self, source: Source, storage: ExpertStorageSpec) -> None:
        self._source = source
        self._storage = storage
        self._decoded: tuple[str, Tensor] | None = None

    def matrix(self, origin: Origin) -> Tensor:
        """Return [out, in], or a stack as it lies on disk."""
        if origin.expert is None:
            return self._source.read(origin.tensor)
        slab = self._expert(self._source.tensors[origin.tensor], origin.expert)
        storage = oriented(self._storage, origin.tensor, self._source.tensors)
        rows = slab.transpose(0, 1) if storage.input_major else slab
        if storage.interleaved_gate_up and origin.count == 2:
            return rows[origin.position :: 2]
        size = rows.shape[0] // origin.count
        return rows[origin.position * size : (origin.position + 1) * size]

    def _expert(self, info: TensorInfo, expert: int) -> Tensor:
        source = self._source
        if isinstance(source, DequantizedSource) and info.name in source.encoded:
            if self._decoded is None or self._decoded[0] != info.name:
                self._decoded = None
                self._decoded = (info.name, source.read(info.name))
            return self._decoded[1][expert]
        return source.read_rows(info.name, range(expert, expert + 1))[0]
