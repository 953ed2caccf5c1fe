"""The journal of a run of several ranks."""

from __future__ import annotations

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
        self._pending: tuple[Unit, list[str], Exporter, WriteBehind, Ticket, list[Any]] | None
        self._pending = None

    def finish(self, unit: Unit, written: list[str], exporter: Exporter, sink: WriteBehind) -> None:
        """Have a unit brought to the disk; from any thread, once the one before is settled."""
        step = self._open.pop(unit.name, None)
        steps: list[Any] = []

        def commit() -> None:
            if not self.notes:
                self._writer.sync()
                steps.extend([step.finish().to_json()] if step is not None else [])

        self._pending = (unit, written, exporter, sink, sink.then(commit), steps)

    def settle(self) -> None:
        """Wait until the last unit is on disk for all ranks, and note it."""
        if self._pending is None:
            return
        (unit, written, exporter, sink, ticket, steps), self._pending = self._pending, None
        sink.wait(ticket)
        mine = {
            "written": written,
            "errors": exporter.errors_of(unit),
            "steps": steps,
            "notes": self.notes,
        }
        everyone = self._team.everyone(f"unit {unit.name}", mine)
        for rank, other in enumerate(everyone):
            if rank != self._team.rank:
                exporter.errors.update(other["errors"])
                self._writer.mark(other["written"])
        self.notes = list(dict.fromkeys(note for other in everyone for note in other["notes"]))
        if self.notes or not self._team.is_first:
            return
        names = [name for other in everyone for name in other["written"]]
        entry = {"unit": unit.name, "written": names, "findings": exporter.findings(unit)}
        self._note(entry, [Step.from_json(s) for other in everyone for s in other["steps"]])
