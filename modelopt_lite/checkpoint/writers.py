"""Several checkpoints that are written together, each by its own `StreamingWriter`."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from modelopt_lite.checkpoint.shards import ExportLayout
from modelopt_lite.checkpoint.writer import Slot, StreamingWriter


@dataclass(frozen=True, slots=True)
class Place:
    """The place of a tensor in one of the checkpoints."""

    writer: StreamingWriter
    slot: Slot


class ExportWriter:
    """Writes the tensors of an export's layout; see `StreamingWriter`.

    Where the layout has folders, the name of a tensor begins with that of its folder and a slash.

    Args:
        folder: Where the export goes.
        layout: What it holds.
        written: Tensors that an earlier writer has written.
        made: Another process has made the files.
    """

    def __init__(
        self,
        folder: Path,
        layout: ExportLayout,
        *,
        written: Iterable[str] = (),
        made: bool = False,
    ) -> None:
        done: dict[str, list[str]] = {part: [] for part in layout.parts}
        self._writers: dict[str, StreamingWriter] = {}
        self._single = set(layout.parts) == {""}
        for name in written:
            part, own = self._split(name)
            done[part].append(own)
        with ExitStack() as opened:
            for part, files in layout.parts.items():
                writer = StreamingWriter(folder / part, files, written=done[part], made=made)
                self._writers[part] = opened.enter_context(writer)
            opened.pop_all()

    def __enter__(self) -> ExportWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for writer in self._writers.values():
            writer.close()

    def claim(
        self, name: str, dtype: torch.dtype, shape: tuple[int, ...], *, again: bool = False
    ) -> Place:
        """Take the place of a tensor; see `StreamingWriter.claim`."""
        part, own = self._split(name)
        writer = self._writers[part]
        return Place(writer, writer.claim(own, dtype, shape, again=again))

    def fill(self, place: Place, tensor: Tensor) -> None:
        """Write a tensor into the place that `claim` gave for it."""
        place.writer.fill(place.slot, tensor)

    def is_claimed(self, name: str) -> bool:
        """Whether a tensor of the layout was written, or is about to be."""
        part, own = self._split(name)
        return self._writers[part].is_claimed(own)

    def mark(self, names: Iterable[str]) -> None:
        """Take note of tensors that another process has written."""
        for name in names:
            part, own = self._split(name)
            self._writers[part].mark(own)

    def sync(self) -> None:
        """Bring what was written so far to the disk."""
        for writer in self._writers.values():
            writer.sync()

    def finish(self) -> None:
        """Complete every checkpoint; see `StreamingWriter.finish`."""
        for writer in self._writers.values():
            writer.finish()

    def _split(self, name: str) -> tuple[str, str]:
        if self._single:
            return "", name
        part, _, own = name.partition("/")
        return part, own
