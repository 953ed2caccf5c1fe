"""Traps: what happens around a unit's forward in each phase (seed 002).

A direct trap lets the unit's own parameters read from the device while it is open. An indirect one
leaves parameters alone and hands device copies to each torch function instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any, Protocol, Self

from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from modelopt_lite.offload.device import Device, Event


class Carrier(Protocol):
    """What brings a label's weights in and lets them go."""

    def enter(self, label: str) -> None:
        """Bring in."""

    def exit(self, label: str) -> None:
        """Let go."""


class _TrapBase:
    """A context around one unit's forward. It can be entered again inside of itself."""

    def __init__(self, label: str, carrier: Carrier, on_exit: Callable[[str], None]) -> None:
        self.label = label
        self._carrier = carrier
        self._on_exit = on_exit

    def __enter__(self) -> Self:
        self._carrier.enter(self.label)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self._on_exit(self.label)
        finally:
            self._carrier.exit(self.label)


class _TimedTrap(_TrapBase):
    """A trap that measures the time between bringing in and letting go."""

    def __init__(
        self,
        label: str,
        carrier: Carrier,
        on_exit: Callable[[str], None],
        device: Device,
        record: Callable[[str, Event, Event], None],
    ) -> None:
        super().__init__(label, carrier, on_exit)
        self._device = device
        self._record = record
        self._starts: list[Event] = []

    def __enter__(self) -> Self:
        super().__enter__()
        start = self._device.event(timing=True)
        self._device.record(start)
        self._starts.append(start)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        start, end = self._starts.pop(), self._device.event(timing=True)
        try:
            self._on_exit(self.label)
            self._device.record(end)
            if kind is None:  # the time of a forward that failed says nothing
                self._record(self.label, start, end)
        finally:
            self._carrier.exit(self.label)


class WarmupTrapDirect(_TrapBase):
    """Discovery, direct: the tensors that the unit owns are on the device while it runs."""


class TrapDirect(_TimedTrap):
    """Profiling, direct: the same, timed."""


class TrapInferDirect(_TrapBase):
    """Inference, direct: weights come through blocks, ahead of time."""


class _Interception(TorchFunctionMode):
    """Replaces managed tensors among the arguments of every torch function."""

    def __init__(self, replace: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self._replace = replace

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call the function with device copies."""

        def swap(value: Any) -> Any:
            return self._replace(value) if isinstance(value, Tensor) else value

        return func(*tree_map(swap, args), **tree_map(swap, kwargs or {}))


class _Indirect(_TrapBase):
    """Adds interception to a trap: inside, managed tensors are replaced argument by argument."""

    replace: Callable[[Tensor], Tensor]

    def __enter__(self) -> Self:
        super().__enter__()
        self._modes: list[_Interception] = getattr(self, "_modes", [])
        self._modes.append(_Interception(self.replace))
        self._modes[-1].__enter__()
        return self

    def __exit__(self, *details: Any) -> None:
        self._modes.pop().__exit__(None, None, None)
        super().__exit__(*details)


class WarmupTrap(_Indirect):
    """Discovery, indirect: notes which managed tensors the operations read."""


class Trap(_Indirect, _TimedTrap):
    """Profiling, indirect: the label's tensors on the device, timed."""


class TrapInfer(_Indirect):
    """Inference, indirect."""
