"""Note each layer that a search by gradients has gone back through, and go on before it later.

What is noted: the scores so far, how many calls of layers each pass has left, and the gradients of
what those calls returned. A later search runs the passes forth only to where they were left, and
goes back from there: the layers behind, and the head, are not read again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from modelopt_lite.checkpoint.journal import Journal
from modelopt_lite.checkpoint.reader import byte_view
from modelopt_lite.errors import InternalError
from modelopt_lite.offload.replay import StepWriter
from modelopt_lite.offload.tape import Call, Tape

Sums = dict[tuple[str, str], Tensor]
"""Group, format -> score so far, float64."""


class SearchLog:
    """The journal of one search.

    Args:
        folder: Of the journal and its files; made where it is missing.
        inputs: All that scores depend on.

    Attributes:
        left: Pass -> how many calls of layers it has left; None where nothing was noted.
        done: The layers that were gone back through.

    Raises:
        OutputError: The journal there is of a search with other inputs.
    """

    def __init__(self, folder: Path, inputs: Mapping[str, Any]) -> None:
        self._folder = folder
        self._journal = Journal(folder, inputs)
        entries = self._journal.entries
        self._last: dict[str, Any] | None = entries[-1] if entries else None
        self._count = len(entries)
        self.done = [entry["layer"] for entry in entries]
        self.left: dict[int, int] | None = None
        if self._last is not None:
            self.left = {int(index): count for index, count in self._last["left"].items()}

    def sums(self) -> Sums:
        """Return the scores so far."""
        found = self._last["sums"] if self._last is not None else []
        return {(group, fmt): torch.tensor(v, dtype=torch.float64) for group, fmt, v in found}

    def restore(self, tape: Tape) -> None:
        """Give calls the gradients of what they returned."""
        if self._last is None:
            return
        calls = {(call.index, call.number): call for calls in tape.visits for call in calls}
        with (self._folder / self._last["file"]).open("rb") as file:
            for index, number, place, written in self._last["gradients"]:
                value = torch.empty(written["shape"], dtype=getattr(torch, written["dtype"]))
                file.seek(written["at"])
                if value.numel() and file.readinto(byte_view(value)) != value.nbytes:
                    raise InternalError(f"{file.name} ends too soon")
                tape.add(calls[index, number], place, value)

    def add(self, layer: str, tape: Tape, visits: Iterable[list[Call]], sums: Sums) -> None:
        """Note that a layer was gone back through; on return it is on disk.

        Args:
            layer: The layer.
            tape: Has the gradients.
            visits: Those that are left.
            sums: The scores so far.
        """
        self._count += 1
        writer = StepWriter(self._folder / f"gradients-{self._count:05d}.bin")
        left: dict[int, int] = {}
        kept: list[tuple[int, int, int]] = []
        for calls in visits:
            for call in calls:
                left[call.index] = max(left.get(call.index, 0), call.number + 1)
                for place, gradient in tape.gradients(call):
                    writer.add(len(kept), gradient)
                    kept.append((call.index, call.number, place))
        step = writer.finish()
        before, self._last = (
            self._last,
            {
                "layer": layer,
                "left": left,
                "sums": [[*key, float(value)] for key, value in sums.items()],
                "gradients": [[*key, step.outputs[at]] for at, key in enumerate(kept)],
                "file": step.file,
            },
        )
        self._journal.add(self._last)
        if before is not None:
            (self._folder / before["file"]).unlink(missing_ok=True)
