"""Run a model whose weights come from a checkpoint unit by unit, each read ahead of its turn."""

from __future__ import annotations

import sys
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial, wraps
from types import TracebackType
from typing import Any

from torch import nn

from modelopt_lite.errors import InternalError
from modelopt_lite.offload.expert_parts import ExpertRows
from modelopt_lite.offload.forwards import running
from modelopt_lite.offload.lockstep import Lockstep
from modelopt_lite.offload.memory import release_freed
from modelopt_lite.offload.prefetch import Prefetcher
from modelopt_lite.offload.replay import Replay, Returned
from modelopt_lite.offload.store import Loaded, WeightStore
from modelopt_lite.offload.units import Unit, output_head, text_model
from modelopt_lite.offload.waiting import Waiting

_AGAIN = "#again"
Entered = Callable[[Loaded], None]
Leaving = Callable[[Loaded, Callable[[], None]], None]


class StreamedModel:
    """A model on the meta device whose units have weights while passes run through them.

    Args:
        model: The model.
        store: Brings units in.
        units: The units that passes may run.
            Parts of experts follow their layers.
        budget: Bytes of units in memory at a time; None: as many as there are.
        arrived: Called with a unit that was read, on the thread that read it.
        entered: Called with a unit when it is in the model.
        leaving: Called with a unit before it leaves the model, and with a function that gives its
            memory back: to be called, from any thread, when nothing reads the unit any more.
        finished: Layers that passes are not expected to run any more.
        resident: Units that stay in memory once they were read, and are not read again.
        again: Called with a layer that all passes have run through; they then run through it once
            more, with the same inputs, and go on with what it returns then. None: they run once.
        parts_twice: Passes are expected to run through the parts of a layer, and then once more.
        stations: Layer -> places in it where passes wait for each other, when they `want` one.
        serve: Called with a station when all passes wait there; parts of the layer then come in
            where it asks for them, by `inside`.

    Attributes:
        rows: A context that passes run in, outside of any other that looks at torch's functions.
    """

    def __init__(
        self,
        model: nn.Module,
        store: WeightStore,
        units: Sequence[Unit],
        *,
        budget: int | None,
        entered: Entered,
        leaving: Leaving,
        arrived: Entered | None = None,
        finished: Container[str] = (),
        resident: Container[str] = (),
        again: Entered | None = None,
        parts_twice: bool = False,
        stations: Mapping[str, Sequence[str]] | None = None,
        serve: Callable[[str], None] = lambda station: None,
    ) -> None:
        self._model = model
        self._store = store
        kept = [unit for unit in units if not unit.name]
        # A dict, for its order; entries that no unit module holds are among them.
        self._kept = {unit.name: unit for unit in kept}
        units = [*kept, *(unit for unit in units if unit.name not in self._kept)]
        self._units = {unit.name: unit for unit in units}
        self._entered = entered
        self._leaving = leaving
        self._again = again
        self._stations = dict(stations or {})
        self._at = {name for names in self._stations.values() for name in names}
        self._serve = serve
        self._numbers: Sequence[int] | None = None
        self._inside: dict[str, Loaded] = {}
        self._lockstep: Lockstep | None = None
        self._parts = [unit for unit in units if unit.parent is not None]
        self.rows = ExpertRows(model, self._parts, store.device, self.want)
        self._prefetcher = Prefetcher(
            store,
            _expected(model, [u for u in units if u.name not in finished], parts_twice),
            budget=sys.maxsize if budget is None else budget,
            resident=resident,
            arrived=arrived,
        )

    def __enter__(self) -> StreamedModel:
        self._prefetcher.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._prefetcher.__exit__(kind, error, trace)

    def run_together(
        self,
        passes: Sequence[Callable[[], Any]],
        *,
        waiting: Waiting | None = None,
        replay: Replay | None = None,
        returned: Returned = lambda index, name, output: None,
        ended: Callable[[int], bool] = lambda index: False,
        numbers: Sequence[int] | None = None,
    ) -> list[Any]:
        """Run passes in lockstep, so that each unit comes in once for all.

        Args:
            passes: What to run.
            waiting: Keeps what suspended passes hold within a budget.
            replay: Calls of layers that an earlier run has finished; where it is given,
            returned: is called with a pass, a layer and what that returned in this run.
            ended: Whether a pass shall run into the next layer without its weights, which then
                must not use them.
            numbers: What the passes are called there; None: by their positions.

        Returns:
            The results of the passes.
        """
        named = [u.name for u in self._units.values() if not (u.parent or u.name in self._kept)]
        modules = {name: self._model.get_submodule(name) for name in named}
        parts: dict[str, list[str]] = {}
        for part in self._parts:
            if part.parent not in self._stations:
                parts.setdefault(str(part.parent), []).append(part.name)
        for name, stations in self._stations.items():
            parts.setdefault(name, []).extend(stations)
        self._numbers = numbers
        layers = {name: modules[name] for name in named if self._units[name].is_layer}
        if self._again is not None:
            for name in layers:  # behind all parts: a pass comes to it when the layer returns
                parts.setdefault(name, []).append(f"{name}{_AGAIN}")
        for name in self._kept:
            self._enter(name)

        def skips(name: str) -> bool:
            if name not in layers:
                return False
            return ended(self.current) or (replay is not None and replay.is_pending(self.current))

        lockstep = self._lockstep = Lockstep(
            modules,
            enter=self._enter,
            leave=self._leave,
            parts=parts,
            skips=skips,
            waiting=waiting,
        )
        with ExitStack() as stack:
            stack.enter_context(self._asking_experts())
            if self._again is not None:  # inside of what replay puts around a layer
                stack.enter_context(self._running_twice(layers))
            if replay is not None:
                stack.enter_context(replay.around(layers, lambda: self.current, returned))
            results = lockstep.run(passes)
        for name in self._kept:
            self._leave(name)
        return results

    def run_resident(self, passes: Sequence[Callable[[], Any]]) -> list[Any]:
        """Bring all units in, run the passes one after another, and let all units go."""
        for name in self._units:
            self._enter(name)
        results = [run() for run in passes]
        for name in self._units:
            self._leave(name)
        return results

    @property
    def peak(self) -> int:
        """The most bytes of units that were in memory at a time."""
        return self._prefetcher.peak

    @property
    def current(self) -> int:
        """The number of the pass that is running; see `Lockstep.current`."""
        if self._lockstep is None:
            raise InternalError("no pass is running")
        position = self._lockstep.current
        return position if self._numbers is None else self._numbers[position]

    @contextmanager
    def inside(self, part: str) -> Iterator[None]:
        """Have a part of the current layer in memory."""
        self._enter(part)
        yield
        self._leave(part)

    def want(self, part: str) -> None:
        """Suspend the current pass until a part of its layer is in, or a station is served."""
        if self._lockstep is None:
            raise InternalError(f"part {part!r} was asked for outside of run_together")
        self._lockstep.want(part)

    @contextmanager
    def _asking_experts(self) -> Iterator[None]:
        """Have experts that are modules of their own ask for their part before they run."""

        def hook(part: Unit) -> Callable[..., None]:
            return lambda *args: None if part.name in self._inside else self.want(part.name)

        hooks = [
            self._model.get_submodule(f"{part.container}.{index}").register_forward_pre_hook(
                hook(part)
            )
            for part in self._parts
            if not part.is_stacked and part.parent not in self._stations
            for index in part.experts or ()
        ]
        try:
            yield
        finally:
            for handle in hooks:
                handle.remove()

    def _running_twice(self, layers: Mapping[str, nn.Module]) -> AbstractContextManager[None]:
        """Have layers run twice, their arguments held by the suspended pass."""

        def twice(name: str, forward: Callable[..., Any]) -> Callable[..., Any]:
            @wraps(forward)
            def run(*args: Any, **kwargs: Any) -> Any:
                forward(*args, **kwargs)
                self.want(f"{name}{_AGAIN}")
                return forward(*args, **kwargs)

            return run

        return running({m: twice(name, m.forward) for name, m in layers.items()})

    def _enter(self, name: str) -> None:
        if name in self._at:
            self._serve(name)
            return
        if name.endswith(_AGAIN):
            assert self._again is not None
            self._again(self._inside[name.removesuffix(_AGAIN)])
            return
        loaded = self._inside[name] = self._prefetcher.take(self._units[name])
        if loaded.unit.is_stacked:
            self.rows.attach(loaded)
        else:
            self._store.attach(loaded)
        self._entered(loaded)

    def _leave(self, name: str) -> None:
        if name.endswith(_AGAIN) or name in self._at:
            return
        loaded = self._inside.pop(name)
        self._leaving(loaded, partial(self._prefetcher.done, loaded))
        if loaded.unit.is_stacked:
            self.rows.detach(loaded.unit)
        else:
            self._store.detach(loaded.unit)
        release_freed()


def _expected(model: nn.Module, units: Sequence[Unit], twice: bool) -> list[Unit]:
    """Return the order in which units come in, where parts of layers may do so twice."""
    order: list[Unit] = []
    parts: list[Unit] = []
    for unit in expected_order(model, units):
        if unit.parent is None:
            order += parts
            parts = []
        elif twice:
            parts.append(unit)
        order.append(unit)
    return order + parts


def expected_order(model: nn.Module, units: Sequence[Unit]) -> list[Unit]:
    """Return the units that text runs through, in the order of the model's modules."""
    inside = {id(module) for module in text_model(model).modules()}
    if head := output_head(model):
        inside.add(id(head[1]))
    named = [u for u in units if u.name and id(model.get_submodule(u.parent or u.name)) in inside]
    return [unit for unit in units if not unit.name] + named
