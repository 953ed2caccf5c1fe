"""What the runtime measured, planned and holds: rows for programs, tables for people."""

from __future__ import annotations

import io
import logging
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.box import SIMPLE
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from modelopt_lite.errors import OffloadError
from modelopt_lite.offload.ledger import TIERS, Ledger
from modelopt_lite.offload.stats import TransferCurve
from modelopt_lite.offload.tensors import TensorManager

if TYPE_CHECKING:
    from modelopt_lite.offload.managerstate import ManagerState  # which logs these tables

log = logging.getLogger("modelopt_lite.offload.diagnostics")


@dataclass(frozen=True, slots=True)
class UnitRow:
    """One label.

    Attributes:
        label: Its name.
        samples: How many times it was timed; without any, the times are 0.
        min_ms: The least of them.
        median_ms: What the plan is made with.
        max_ms: The most.
        variation: Standard deviation over mean.
        nbytes: Bytes of its tensors.
        moved_bytes: Bytes of them that are brought in each pass; the rest stays on the device.
        block: Index of the block they come to; None where nothing is brought in.
        copy_ms: How long the copy takes, by the measured curve.
        stall_ms: How long computing waits for it, as predicted.
    """

    label: str
    samples: int
    min_ms: float
    median_ms: float
    max_ms: float
    variation: float
    nbytes: int
    moved_bytes: int
    block: int | None
    copy_ms: float
    stall_ms: float


def unit_rows(manager: ManagerState) -> list[UnitRow]:
    """Return a row for each label, in the order of a pass.

    Raises:
        OffloadError: Nothing is offloaded.
    """
    tensors = _tensors(manager)
    collector, plan = tensors.layer_statistics_collector, tensors.plan
    samples = collector.samples()
    data = plan.block_data if plan is not None else None
    curve = TransferCurve(tensors.transfer_curve()) if data is not None else None
    rows = []
    for layer in collector.get_layer_stats():
        times = samples[layer.label]
        mean = statistics.fmean(times) if times else 0.0
        moved = data.label_to_size_map.get(layer.label, 0) if data is not None else 0
        rows.append(
            UnitRow(
                label=layer.label,
                samples=len(times),
                min_ms=min(times, default=0.0),
                median_ms=layer.duration,
                max_ms=max(times, default=0.0),
                variation=statistics.pstdev(times) / mean if mean else 0.0,
                nbytes=layer.size_bytes,
                moved_bytes=moved,
                block=data.label_to_block_id.get(layer.label) if data is not None else None,
                copy_ms=curve.ms(moved) if curve is not None and moved else 0.0,
                stall_ms=plan.prediction.stall_ms.get(layer.label, 0.0) if plan is not None else 0,
            )
        )
    return rows


def units_table(rows: Sequence[UnitRow]) -> Table:
    """Return the rows as a table; labels are in the order of a pass."""
    table = _table("unit", "times", "compute ms (min, median, max)", "CV", "size", "moved")
    for title in ("block", "copy ms", "stall ms"):
        table.add_column(title, justify="right")
    for row in rows:
        table.add_row(
            row.label,
            str(row.samples),
            f"{row.min_ms:.3f}  {row.median_ms:.3f}  {row.max_ms:.3f}",
            f"{row.variation:.2f}",
            size_text(row.nbytes),
            size_text(row.moved_bytes),
            "-" if row.block is None else str(row.block),
            f"{row.copy_ms:.3f}",
            f"{row.stall_ms:.3f}",
        )
    return table


def transfers_table(points: dict[int, float]) -> Table:
    """Return the measured copies: bytes -> ms."""
    table = _table("copy of", "bytes", "ms", "GB/s")
    for nbytes, ms in sorted(points.items()):
        table.add_row(size_text(nbytes), f"{nbytes:,}", f"{ms:.3f}", f"{nbytes / ms / 1e6:.2f}")
    return table


def ledger_table(ledger: Ledger) -> Table:
    """Return every owner's bytes, now and at most, with a sum for each tier."""
    table = _table("where", "whose", "now", "at most")
    rows = ledger.report()
    for tier in TIERS:
        own = [row for row in rows if row.tier == tier]
        for row in own:
            table.add_row(tier, row.owner, size_text(row.nbytes), size_text(row.peak))
        if own:
            now, peak = ledger.total(tier), ledger.peak(tier)
            table.add_row(tier, "in all", size_text(now), size_text(peak), style="bold")
            table.add_section()
    return table


def diagnostics(manager: ManagerState) -> RenderableType:
    """Return all tables of a manager, to print with rich.

    Raises:
        OffloadError: Nothing is offloaded.
    """
    tensors = _tensors(manager)
    facts = [Text(f"manager {manager.name!r}, {manager.phase.name}, {_counts(tensors)}")]
    plan = tensors.plan
    if plan is not None:
        made = plan.prediction
        facts.append(
            Text(
                f"a pass takes {made.pass_ms:.3f} ms by the plan, {made.compute_ms:.3f} ms of them "
                f"computing; blocks and kept weights take {size_text(made.peak_bytes)}"
            )
        )
        facts += [Text(f"note: {note}") for note in plan.notes]
    return Group(
        *facts,
        units_table(unit_rows(manager)),
        transfers_table(tensors.transfer_curve()),
        ledger_table(tensors.ledger),
    )


def diagnostics_text(manager: ManagerState, *, width: int = 140) -> str:
    """Return `diagnostics` as plain text."""
    console = Console(file=io.StringIO(), width=width, color_system=None)
    with console.capture() as captured:
        console.print(diagnostics(manager))
    return captured.get()


def log_diagnostics(manager: ManagerState) -> None:
    """Log `diagnostics_text` to ``modelopt_lite.offload.diagnostics``, at INFO.

    The logger gets a handler of its own where nothing would show its records.
    """
    if not log.isEnabledFor(logging.INFO) or not log.hasHandlers():
        log.setLevel(logging.INFO)
    if not log.hasHandlers():
        log.addHandler(logging.StreamHandler())
    log.info("%s", diagnostics_text(manager))


def write_trace(manager: ManagerState, path: Path | str) -> Path:
    """Write the copies and computes of the last passes as a Chrome trace; ui.perfetto.dev opens it.

    Raises:
        OffloadError: Nothing is offloaded, or no pass was recorded: that needs
            ``enable_diagnostics`` and a pass in INFERENCE.
    """
    timeline = _tensors(manager).timeline
    if not timeline.passes():
        raise OffloadError(
            "no pass was recorded: set enable_diagnostics=True, and run a pass in INFERENCE "
            f"(manager {manager.name!r} is in {manager.phase.name})"
        )
    timeline.write(Path(path))
    return Path(path)


def size_text(count: int) -> str:
    """Return a size in powers of 1000 with three digits: ``8.31 MB``."""
    size = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{count} B" if unit == "B" else f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} TB"


def _counts(tensors: TensorManager) -> str:
    counts = tensors.loader.counts
    return (
        f"{counts.copies} copies of {size_text(counts.bytes_copied)} in all, {counts.misses} of "
        "them not foreseen"
    )


def _tensors(manager: ManagerState) -> TensorManager:
    tensors = manager.get_tensor_manager()
    if tensors is None:
        raise OffloadError(f"manager {manager.name!r} has nothing to tell of: call offload() first")
    return tensors


def _table(*titles: str) -> Table:
    table = Table(box=SIMPLE, pad_edge=False)
    for at, title in enumerate(titles):
        text = at == 0 or title == "whose"
        table.add_column(title, justify="left" if text else "right")
    return table
