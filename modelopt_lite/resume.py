"""Note each finished unit in the journal, and let a later run go on behind them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch

from modelopt_lite.checkpoint.behind import Ticket, WriteBehind
from modelopt_lite.checkpoint.journal import Journal
from modelopt_lite.checkpoint.writers import ExportWriter
from modelopt_lite.export.exporter import Exporter
from modelopt_lite.offload.replay import NotReplayableError, Replay, Step, StepWriter
from modelopt_lite.offload.units import Unit


class UnitLog:
    """Keeps the journal of one run; a context that closes its files.

    Args:
        journal: The journal, with what an earlier run finished.
        writer: Writes the export; what it has written is synced before a unit is noted.
        device: Where the model runs.

    Attributes:
        replay: The outputs of finished layers.
        finished_layers: Their names.
        notes: Why the run cannot be resumed, if so.
    """

    def __init__(self, journal: Journal, writer: ExportWriter, device: torch.device) -> None:
        self._journal = journal
        self._writer = writer
        self._count = len(journal.entries)
        self._open: dict[str, StepWriter] = {}
        self._files = ExitStack()
        self._last: Ticket | None = None
        self._mark = ""  # in names of files
        self.notes: list[str] = []
        steps = [Step.from_json(step) for entry in journal.entries for step in entry["steps"]]
        self.replay = Replay(journal.folder, steps, device)
        self._kept = self.replay.files
        self.finished_layers = {e["unit"] for e in journal.entries if e["steps"]}
        self._finished = {entry["unit"] for entry in journal.entries}

    def __enter__(self) -> UnitLog:
        return self

    def __exit__(self, *error: object) -> None:
        self._files.close()

    def restore(self, exporter: Exporter) -> None:
        """Tell the exporter what an earlier run found out about the units it finished."""
        for entry in self._journal.entries:
            exporter.restore(entry["findings"])

    def is_finished(self, unit: Unit) -> bool:
        """Whether an earlier run exported the unit; a layer may still have calls to come."""
        return unit.name in self._finished

    def stop(self, reason: str) -> None:
        """Note no more units: what was noted stays, but nothing behind it can be reached."""
        self.notes.append(f"the run cannot be resumed: {reason}")

    def returned(self, index: int, name: str, output: Any) -> None:
        """Keep what a layer returned to a pass; see `Replay.around`."""
        if self.notes:
            return
        if name not in self._open:
            self._count += 1
            step = StepWriter(self._journal.folder / f"outputs-{self._count:05d}{self._mark}.bin")
            self._open[name] = step
            self._files.callback(step.close)
        try:
            self._open[name].add(index, output)
        except NotReplayableError as error:
            self.stop(f"{error} ({name})")

    def finish(self, unit: Unit, written: list[str], exporter: Exporter, sink: WriteBehind) -> None:
        """Note a unit that all passes have left, once the sink has written it.

        Waits until the unit before it is noted: an interruption then costs one unit.

        Args:
            unit: The unit.
            written: Names of its tensors in the export.
            exporter: Knows what was found out about it.
            sink: Its tensors were handed to it.
        """
        step = self._open.pop(unit.name, None)
        if self.notes:  # what comes behind cannot be reached without a layer's output
            return
        entry = {"unit": unit.name, "written": written, "findings": exporter.findings(unit)}
        if self._last is not None:
            sink.wait(self._last)
        self._last = sink.then(partial(self._commit, entry, step))

    def idle(self) -> None:
        """Finish no unit, where other ranks finish one."""

    def settle(self) -> None:
        """Have what several ranks must agree on settled; see `ranks.log`."""

    def _commit(self, entry: dict[str, Any], step: StepWriter | None) -> None:
        self._writer.sync()
        self._note(entry, [step.finish()] if step is not None else [])

    def _note(self, entry: dict[str, Any], steps: Sequence[Step]) -> None:
        """Add an entry, and remove the files that later runs do not need any more."""
        self._journal.add({**entry, "steps": [step.to_json() for step in steps]})
        before = set(self._kept.values())
        for step in steps:
            self._kept.update(dict.fromkeys(step.outputs, step.file))
        for name in before - set(self._kept.values()):
            (self._journal.folder / name).unlink()
