"""Note each layer that a search by divergence has run through, and go on behind it later.

What is noted: what the layer returned, to each pass and in each variant of the model. A later
search replays the passes up to there, and its variants are there again; layers before are not read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from modelopt_lite.checkpoint.journal import Journal
from modelopt_lite.offload.replay import NotReplayableError, Replay, Step, StepWriter

Variant = tuple[str, str]
"""A group, and the format that it is in."""
Became = tuple[int, Variant, dict[int, Tensor]]
"""A pass, a variant, and what the last layer's outputs became in it, by their positions."""


class VariantLog:
    """The journal of one search.

    Args:
        folder: Of the journal and its files; made where it is missing.
        inputs: All that scores depend on.
        passes: How many passes there are.
        device: Where the model runs.

    Attributes:
        done: The layers that were run through.

    Raises:
        OutputError: The journal there is of a search with other inputs.
    """

    def __init__(
        self, folder: Path, inputs: Mapping[str, Any], passes: int, device: torch.device
    ) -> None:
        self._journal = Journal(folder, inputs)
        self._passes = passes
        self._device = device
        self._writer: StepWriter | None = None
        self._stopped = False
        self._count = len(self._journal.entries)
        self.done = [entry["layer"] for entry in self._journal.entries]
        self._steps = [Step.from_json(entry["step"]) for entry in self._journal.entries]
        self._file = self._steps[-1].file if self._steps else None

    def replay(self, taken: Callable[[int, int, Any], Any]) -> Replay:
        """Return what finished layers returned.

        Args:
            taken: Called with a pass, the number of its finished calls and what the last one of
                them returned; returns what takes the place of that.
        """
        return _Replay(self._journal.folder, self._own_steps(), self._device, taken)

    def variants(self) -> Iterator[Became]:
        """Yield what was noted last."""
        if not self._steps:
            return
        last, noted = self._steps[-1], self._journal.entries[-1]["variants"]
        kept = {number: own for number, own in last.outputs.items() if number >= self._passes}
        replay = Replay(self._journal.folder, [Step(kept, last.file)], self._device)
        for number, (index, group, fmt, places) in enumerate(noted):
            values = replay.next(self._passes + number)
            yield index, (group, fmt), dict(zip(places, values, strict=True))

    def returned(self, index: int, name: str, output: Any) -> None:
        """Note what a layer returned to a pass."""
        if self._stopped:
            return
        if self._writer is None:
            self._count += 1
            self._writer = StepWriter(self._journal.folder / f"variants-{self._count:05d}.bin")
        try:
            self._writer.add(index, output)
        except NotReplayableError:  # what comes behind cannot be reached without it
            self._stopped = True
            self._writer.close()

    def finish(self, layer: str, became: Iterable[Became]) -> None:
        """Note that all passes have left a layer; on return it is on disk.

        Raises:
            OutputError: The disk is full, or failed.
        """
        if self._stopped or self._writer is None:
            return
        noted = []
        for number, (index, variant, values) in enumerate(became):
            self._writer.add(self._passes + number, [*values.values()])
            noted.append([index, *variant, [*values]])
        step, self._writer = self._writer.finish(), None
        self._journal.add({"layer": layer, "step": step.to_json(), "variants": noted})
        if self._file is not None:
            (self._journal.folder / self._file).unlink(missing_ok=True)
        self._file = step.file

    def _own_steps(self) -> Iterator[Step]:
        for step in self._steps:
            own = {index: value for index, value in step.outputs.items() if index < self._passes}
            yield Step(own, step.file)


class _Replay(Replay):
    """Hands on what the last finished call of each pass returned."""

    def __init__(
        self,
        folder: Path,
        steps: Iterable[Step],
        device: torch.device,
        taken: Callable[[int, int, Any], Any],
    ) -> None:
        super().__init__(folder, steps, device)
        self._taken = taken

    def next(self, index: int) -> Any:
        """See `Replay`."""
        output = super().next(index)
        return output if self.is_pending(index) else self._taken(index, self._done[index], output)
