"""The journal of a run of several ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from modelopt_lite.checkpoint.behind import Ticket, WriteBehind
from modelopt_lite.checkpoint.journal import Journal
from modelopt_lite.checkpoint.writers import ExportWriter
from modelopt_lite.export.exporter import Exporter
from modelopt_lite.offload.replay import Step
from modelopt_lite.offload.units import Unit
from modelopt_lite.parallel.team import Team
from modelopt_lite.resume import UnitLog


@dataclass(slots=True)
class _Pending:
    """A unit on its way to the disk."""

    unit: Unit
    written: list[str]
    sink: WriteBehind
    ticket: Ticket
    steps: list[Any]


class RankLog(UnitLog):
    """The journal of a run of several ranks: rank 0 notes a unit when it is on disk for all.

    Args:
        team: The ranks.
        journal: As rank 0 has it, or as the others read it.
        writer: Writes what is this rank's.
        device: Where the model runs.
    """

    def __init__(
        self, team: Team, journal: Journal, writer: ExportWriter, device: torch.device
    ) -> None:
        super().__init__(journal, writer, device)
        self._team = team
        self._mark = f"-rank{team.rank}"
        self._pending: _Pending | None = None
        self._idle = False
        self._settled = 0

    def restore(self, exporter: Exporter) -> None:
        """See `UnitLog`; what other ranks find out is told to the exporter, too."""
        super().restore(exporter)
        self._exporter = exporter

    def finish(self, unit: Unit, written: list[str], exporter: Exporter, sink: WriteBehind) -> None:
        """Have a unit brought to the disk; from any thread, once the one before is settled."""
        step = self._open.pop(unit.name, None)
        steps: list[Any] = []

        def commit() -> None:
            if not self.notes:
                self._writer.sync()
                steps.extend([step.finish().to_json()] if step is not None else [])

        self._pending = _Pending(unit, written, sink, sink.then(commit), steps)

    def idle(self) -> None:
        """Take part in noting what others finish."""
        self._idle = True

    def settle(self) -> None:
        """Wait until the last unit of each rank is on disk, and note it, or them."""
        pending, self._pending = self._pending, None
        if pending is None and not self._idle:
            return
        self._idle = False
        self._settled += 1
        everyone = self._team.everyone(f"unit {self._settled}", self._told(pending))
        for rank, other in enumerate(everyone):
            if rank != self._team.rank:
                self._exporter.errors.update(other["errors"])
                self._writer.mark(other["written"])
        self.notes = list(dict.fromkeys(note for other in everyone for note in other["notes"]))
        if self.notes or not self._team.is_first:
            return
        for unit in dict.fromkeys(other["unit"] for other in everyone if other["unit"]):
            parts = [other for other in everyone if other["unit"] == unit]
            names = [name for part in parts for name in part["written"]]
            findings = self._exporter.findings(unit)
            entry = {"unit": unit.name, "written": names, "findings": findings}
            self._note(entry, [Step.from_json(step) for part in parts for step in part["steps"]])

    def _told(self, pending: _Pending | None) -> dict[str, Any]:
        """What the others are told of this rank's last unit, once it is on disk."""
        if pending is None:
            return {"unit": None, "written": [], "errors": {}, "steps": [], "notes": self.notes}
        pending.sink.wait(pending.ticket)
        return {
            "unit": pending.unit,
            "written": pending.written,
            "errors": self._exporter.errors_of(pending.unit),
            "steps": pending.steps,
            "notes": self.notes,
        }
