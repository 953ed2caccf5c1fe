"""Calibrate and export unit by unit: one is read, one computes, one is quantized and written."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from modelopt_lite.budgets import Schedule
from modelopt_lite.calibrate.all_experts import calibrate_all_experts
from modelopt_lite.calibrate.attention import watch_attention
from modelopt_lite.calibrate.model_code import model_code
from modelopt_lite.calibrate.observe import InputWatch
from modelopt_lite.checkpoint.behind import WriteBehind
from modelopt_lite.export.exporter import Exporter
from modelopt_lite.export.inputs import RoundedRun
from modelopt_lite.export.quantize import check_finite
from modelopt_lite.finishing import OneBehind
from modelopt_lite.job import Job
from modelopt_lite.offload.forwards import running
from modelopt_lite.offload.store import Loaded
from modelopt_lite.offload.stream import StreamedModel
from modelopt_lite.offload.units import Unit, output_head
from modelopt_lite.offload.waiting import Waiting
from modelopt_lite.plan import Plan
from modelopt_lite.process import threads_beside
from modelopt_lite.progress import Progress
from modelopt_lite.ranks.crew import Alone
from modelopt_lite.resume import UnitLog

# Whether the pass that runs is one of the second run; each pass has a context of its own.
_IN_SECOND_RUN: ContextVar[bool] = ContextVar("_IN_SECOND_RUN", default=False)


def run_calibrated(
    job: Job,
    exporter: Exporter,
    sink: WriteBehind,
    log: UnitLog,
    batches: Sequence[Mapping[str, Tensor]],
    *,
    schedule: Schedule,
    scratch: Path,
    progress: Progress,
    crew: Alone,
) -> None:
    """Calibrate and export unit by unit.

    Args:
        job: The model, on the meta device, and what to do.
        exporter: Takes each unit when all batches have left it, and has the evidence.
        sink: Where the exporter writes to; tells when a unit's memory is free.
        log: Knows which units are finished; the passes go on behind them.
        batches: The model's arguments, on its device: token ids [B, T], and what comes with them.
        schedule: What is in memory when. Where it holds the whole model, all batches run through it
            one after another, and then it is exported.
        scratch: Folder of waiting activations that lie on disk.
        progress: Told how far the run is.
        crew: The ranks of the run, as this one sees them.
    """
    plan, model = job.plan, job.model
    watch = InputWatch(crew.visit)
    searches = plan.recipe.algorithm.needs_inputs
    watched = {m.entry for m in plan.matrices if searches or m.input_group is not None}
    with ExitStack() as stack:
        skipped = stack.enter_context(without_head(model, plan))
        units = [unit for unit in job.own_units if unit.name not in skipped]
        # A search takes as many threads wherever it runs: sums in products depend on their number.
        threads = None if searches else threads_beside()
        behind = stack.enter_context(OneBehind(overlapped=schedule.overlapped, threads=threads))
        tell = _counted(progress, len(units))
        walk = _Walk(model, exporter, sink, log, watch, watched, behind, tell, crew)
        if plan.kv_cache:
            stack.enter_context(watch_attention(model, walk.visit_cache))
        if job.all_experts:
            stack.enter_context(calibrate_all_experts(model, job.model_type, watch))
        stack.enter_context(torch.inference_mode())

        streamed = stack.enter_context(
            StreamedModel(
                model,
                job.store(),
                units,
                budget=schedule.units,
                arrived=_inspect,
                entered=walk.entered,
                leaving=walk.leaving,
                finished=log.finished_layers,
                resident=job.resident,
                again=walk.again if exporter.sequential else None,
                parts_twice=exporter.sequential or job.all_experts,
                stations=crew.stations,
                serve=crew.serve,
            )
        )
        stack.enter_context(crew.sending(streamed, watch))
        own = crew.batches(batches)
        heard = None if crew.silent else watch
        passes = {n: partial(_forward, job, streamed, one, heard) for n, one in own.items()}
        if exporter.rounded:  # behind the others in each layer, whose scales are known then
            heard = watch.twin(RoundedRun(plan.matrices, exporter.evidence).visit)
            passes |= {
                len(batches) + n: partial(_forward, job, streamed, one, heard, second=True)
                for n, one in own.items()
            }
        # Whole models go pass by pass; searches then would hold what entered all layers.
        if schedule.units is None and not searches and type(crew) is Alone:
            streamed.run_resident([*passes.values()])
        else:
            streamed.run_together(
                [*passes.values()],
                waiting=stack.enter_context(_waiting(schedule, scratch)),
                replay=log.replay,
                returned=(lambda *unheard: None) if crew.silent else log.returned,
                numbers=[*passes],
            )
        walk.wait()


def _forward(
    job: Job,
    streamed: StreamedModel,
    batch: Mapping[str, Tensor],
    watch: InputWatch | None,
    *,
    second: bool = False,
) -> None:
    """Run one batch through the model, where ``watch`` sees what enters weights."""
    token = _IN_SECOND_RUN.set(second)
    with streamed.rows, job.products(), watch or nullcontext(), model_code(job.model):
        job.model(**batch, use_cache=False)
    _IN_SECOND_RUN.reset(token)


class _Walk:
    """What happens to each unit on its way through memory."""

    def __init__(
        self,
        model: nn.Module,
        exporter: Exporter,
        sink: WriteBehind,
        log: UnitLog,
        watch: InputWatch,
        watched: set[str],
        behind: OneBehind,
        progress: Callable[[str], None],
        crew: Alone,
    ) -> None:
        self._model = model
        self._exporter = exporter
        self._sink = sink
        self._log = log
        self._watch = watch
        self._watched = watched
        self._behind = behind
        self._progress = progress
        self._crew = crew
        self._written: dict[str, list[str]] = {}  # layers that passes run through again
        self._of_parts: dict[str, list[str]] = {}
        self._left: list[str] = []

    def entered(self, loaded: Loaded) -> None:
        if loaded.unit.name in self._left:  # it may still be quantized by what it saw the last time
            self._behind.wait()
            self._exporter.evidence.recall(self._exporter.sites(loaded.unit))
        if loaded.unit.parent in self._written:  # experts of a layer that is quantized already
            self._crew.replace_part(loaded)
            return
        entries = self._model.state_dict(keep_vars=True) if not loaded.unit.name else None
        self._watch.watch(
            {
                entry: entries[entry] if entries else self._model.get_parameter(entry)
                for entry in loaded.unit.entries
                if entry in self._watched
            }
        )

    def visit_cache(self, module: str, key: Tensor, value: Tensor) -> None:
        """Take note of keys and values, once."""
        if not self._written and not _IN_SECOND_RUN.get():
            self._crew.visit_cache(module, key, value)

    def again(self, loaded: Loaded) -> None:
        """Quantize a layer, so that passes run through what it has become."""
        self._behind.wait()
        unit = loaded.unit
        self._crew.learn(unit)
        self._written[unit.name] = self._crew.export(unit, loaded.sources, loaded.amax)
        self._watch.pause(self._watched)
        self._crew.replace(loaded)

    def leaving(self, loaded: Loaded, give_back: Callable[[], None]) -> None:
        """Wait for the unit before, and have this one finished."""
        unit = loaded.unit
        written = self._written.pop(unit.name, None)
        if written is not None:
            self._watch.resume(self._watched)
            self._crew.forget()
        self.wait()
        if unit.parent is None:  # ranks talk to each other on this thread alone
            self._log.settle()
        if written is None and self._is_exported(unit):
            self._crew.learn(unit)
            self._crew.choose(unit, loaded.sources)
        self._behind.start(partial(self._finish, loaded, written, give_back))
        self._left.append(unit.name)

    def _is_exported(self, unit: Unit) -> bool:
        seen = unit.is_layer or self._exporter.sees_inputs(unit)
        return seen or not self._log.is_finished(unit)

    def wait(self) -> None:
        """Wait for the unit that left last, and tell that it is finished."""
        self._behind.wait()
        if self._left:
            self._progress(f"unit {self._left[-1]}")

    def _finish(
        self,
        loaded: Loaded,
        written: list[str] | None,
        give_back: Callable[[], None],
    ) -> None:
        """Quantize and write a unit, unless that is done, note it, and give its memory back."""
        unit = loaded.unit
        if self._is_exported(unit):
            if written is None:
                written = self._crew.export(unit, loaded.sources, loaded.amax)
            if unit.parent is not None:
                self._of_parts.setdefault(unit.parent, []).extend(written)
            else:
                written += self._of_parts.pop(unit.name, [])
                self._log.finish(unit, written, self._exporter, self._sink)
                self._exporter.evidence.put_away(self._exporter.sites(unit))
        self._sink.wait(self._sink.then(give_back))


def _inspect(loaded: Loaded) -> None:
    """Look at weights before products spread a bad value, which can be named here."""
    loaded.amax = check_finite(loaded.sources)


def _waiting(schedule: Schedule, scratch: Path) -> AbstractContextManager[Waiting | None]:
    """Return what keeps the activations of suspended passes; of None, they stay where they are."""
    if schedule.waiting is None:
        return nullcontext()
    return Waiting(schedule.waiting, scratch, schedule.scratch)


def _counted(progress: Progress, total: int) -> Callable[[str], None]:
    done: set[str] = set()

    def tell(phase: str) -> None:
        done.add(phase)
        progress(phase, len(done), total)

    return tell


@contextmanager
def without_head(model: Any, plan: Plan) -> Iterator[set[str]]:
    """Spare the output head, the largest product of all, where nothing depends on it.

    Its module gives an empty result while this lasts. Yields the names of the units left out.
    """
    found = output_head(model)
    if found is None or any(matrix.unit == found[0] for matrix in plan.matrices):
        yield set()
        return
    name, head = found
    with running({head: lambda x, *args, **kwargs: x.new_zeros((*x.shape[:-1], 0))}):
        yield {name}
