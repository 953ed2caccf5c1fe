"""Let passes go on behind layers that an earlier run has finished, without their weights.

A run keeps what its layers returned last, for each pass. Another run then replays: the model's own
forward runs again, and each finished call of a layer returns at once. Only the last one returns
what it had returned; those before it return NaN in the same shape, for their outputs went into the
layers behind them. A model that uses one again anyway, past the next layer, so ends in NaN, never
in plausible numbers.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from modelopt_lite.checkpoint.reader import byte_view
from modelopt_lite.errors import InternalError, OutputError
from modelopt_lite.offload.forwards import running

Returned = Callable[[int, str, Any], None]


class NotReplayableError(Exception):
    """A layer returned something else than tensors of floating-point numbers."""


@dataclass(frozen=True, slots=True)
class Step:
    """One visit of passes to a layer.

    Attributes:
        outputs: Pass -> the structure of what the layer returned, as JSON values; each tensor by
            its shape, its dtype and its place in the file.
        file: Holds the tensors' bytes.
    """

    outputs: dict[int, Any]
    file: str

    def to_json(self) -> dict[str, Any]:
        """Return the step as JSON values."""
        return {"outputs": {str(k): v for k, v in self.outputs.items()}, "file": self.file}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Step:
        """Undo `to_json`."""
        return cls({int(k): v for k, v in data["outputs"].items()}, data["file"])


class StepWriter:
    """Writes what a layer returns to a file, pass by pass, as soon as it returns.

    At once, for the model's code may change a tensor in place before the last pass has returned.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("wb")
        self._outputs: dict[int, Any] = {}

    def add(self, index: int, value: Any) -> None:
        """Write what one pass got.

        Raises:
            NotReplayableError: It is something else than tensors of floating-point numbers.
            OutputError: The disk is full, or failed.
        """
        try:
            self._outputs[index] = self._write(value)
        except OSError as error:
            raise self._full(error) from error

    def finish(self) -> Step:
        """Bring everything to the disk; from any thread.

        Raises:
            OutputError: The disk is full, or failed.
        """
        try:
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            raise self._full(error) from error
        self.close()
        return Step(self._outputs, self._path.name)

    def _full(self, error: OSError) -> OutputError:
        return OutputError(
            f"what layers return cannot be kept in {self._path.parent} ({error.strerror}); free "
            "some space there"
        )

    def close(self) -> None:
        """Close the file; what is still in its buffer may find no room, and is not needed."""
        with suppress(OSError):
            self._file.close()

    def _write(self, value: Any) -> Any:
        if value is None:
            return None
        if type(value) in (tuple, list):
            return [type(value).__name__, *map(self._write, value)]
        if not isinstance(value, Tensor) or not value.is_floating_point():
            what = value.dtype if isinstance(value, Tensor) else type(value).__name__
            raise NotReplayableError(f"a layer returned {what}")
        at = self._file.tell()
        if value.numel():
            self._file.write(byte_view(value.detach().cpu().contiguous()))
        dtype = str(value.dtype).removeprefix("torch.")
        return {"shape": list(value.shape), "dtype": dtype, "at": at}


class Replay:
    """What finished layers returned, in order.

    Args:
        folder: Holds the steps' files.
        steps: Every visit to a layer that is finished, in order.
        device: Where the values go.
    """

    def __init__(self, folder: Path, steps: Iterable[Step], device: torch.device) -> None:
        self._folder = folder
        self._device = device
        self._calls: dict[int, list[Any]] = {}
        self._file: dict[int, str] = {}
        for step in steps:
            for index, output in step.outputs.items():
                self._calls.setdefault(index, []).append(output)
                self._file[index] = step.file
        self._done = dict.fromkeys(self._calls, 0)

    @property
    def files(self) -> dict[int, str]:
        """Pass -> the file that holds the output of its last finished call."""
        return dict(self._file)

    def is_pending(self, index: int) -> bool:
        """Whether the next call of a layer in a pass is one that is finished."""
        return self._done.get(index, 0) < len(self._calls.get(index, ()))

    def next(self, index: int) -> Any:
        """Return what the next call of a layer in a pass returns."""
        calls, at = self._calls[index], self._done[index]
        self._done[index] += 1
        if at + 1 < len(calls):
            return self._build(calls[at], lambda tensor, at: tensor.fill_(torch.nan))
        with (self._folder / self._file[index]).open("rb") as file:

            def fill(tensor: Tensor, at: int) -> None:
                file.seek(at)
                if tensor.numel() and file.readinto(byte_view(tensor)) != tensor.nbytes:
                    raise InternalError(f"{file.name} ends too soon")

            return self._build(calls[at], fill)

    def _build(self, output: Any, fill: Callable[[Tensor, int], Any]) -> Any:
        """Make the structure again, each tensor filled on the host and put on the device."""
        if output is None:
            return None
        if isinstance(output, dict):
            tensor = torch.empty(output["shape"], dtype=getattr(torch, output["dtype"]))
            fill(tensor, output["at"])
            return tensor.to(self._device)
        kind, *parts = output
        values = [self._build(part, fill) for part in parts]
        return tuple(values) if kind == "tuple" else values

    def around(
        self,
        layers: Mapping[str, nn.Module],
        current: Callable[[], int],
        returned: Returned,
    ) -> AbstractContextManager[None]:
        """Have layers return what is replayed, as long as there is something.

        Args:
            layers: The layers.
            current: Gives the position of the pass that is running.
            returned: Called with a pass, a layer and what it returned, where it really ran.
        """
        stubs = {
            module: self._stub(module.forward, current, _named(returned, name))
            for name, module in layers.items()
        }
        return running(stubs)

    def _stub(
        self,
        forward: Callable[..., Any],
        current: Callable[[], int],
        returned: Callable[[int, Any], None],
    ) -> Callable[..., Any]:
        @wraps(forward)
        def stub(*args: Any, **kwargs: Any) -> Any:
            index = current()
            if self.is_pending(index):
                return self.next(index)
            output = forward(*args, **kwargs)
            returned(index, output)
            return output

        return stub


def _named(returned: Returned, name: str) -> Callable[[int, Any], None]:
    return lambda index, output: returned(index, name, output)
