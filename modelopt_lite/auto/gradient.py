"""Score formats by gradients: what a format changes in a product, times the gradient there.

Rounding adds an error to each output of a matrix. The loss then changes, to the second order, by a
sum over outputs of the error squared times a curvature, and the Fisher information stands for that:
the square of the loss's gradient. So the score of a format is the sum, over tokens and outputs of
all matrices of a group, of ``(gradient * error) ** 2``. Both come from the model as it is, so one
pass serves all groups and all formats.

Source: the scoring by gradients of NVIDIA Model Optimizer's AutoQuantize. It sums within the dtype
of the model; here the gradient is the model's own and the rest float32 and float64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from modelopt_lite.auto.outlook import SearchSchedule
from modelopt_lite.auto.resume import SearchLog, Sums
from modelopt_lite.auto.rounded import Part, input_scales, layer_parts
from modelopt_lite.auto.space import Scores, Space
from modelopt_lite.calibrate.model_code import model_code
from modelopt_lite.calibrate.observe import InputStats, InputWatch, Site
from modelopt_lite.errors import CalibrationError, SpecError
from modelopt_lite.job import Job
from modelopt_lite.offload.memory import release_freed
from modelopt_lite.offload.prefetch import Prefetcher
from modelopt_lite.offload.shelf import Shelf
from modelopt_lite.offload.store import Loaded
from modelopt_lite.offload.stream import StreamedModel
from modelopt_lite.offload.tape import Call, ReachedError, Tape
from modelopt_lite.offload.waiting import Waiting
from modelopt_lite.progress import Progress
from modelopt_lite.words import counted

_LOSS_CHUNK = 1 << 22  # logits that are float32 at a time: 16 MiB


def gradient_scores(
    job: Job,
    space: Space,
    batches: Sequence[Tensor],
    *,
    schedule: SearchSchedule,
    scratch: Path,
    progress: Progress,
    log: SearchLog | None = None,
) -> Scores:
    """Return the score of every format of every group.

    Decoder layers are read twice, the rest of the model once.

    Args:
        job: The source and its model, on the meta device.
        space: What is searched.
        batches: Token ids [B, T], on the model's device.
        schedule: What is in memory when.
        scratch: Folder of what is put away on disk.
        progress: Told how far it is.
        log: Where each layer that is done is noted, and was by an earlier search.

    Raises:
        CalibrationError: A group saw no token, or no gradient.
        SpecError: The model multiplies by a part of a matrix.
    """
    layers = {unit.name: unit for unit in job.plan.units if unit.is_layer}
    total = len(job.plan.units) + len(layers)
    done: list[str] = []

    def tell(phase: str) -> None:
        done.append(phase)
        progress(phase, min(len(done), total), total)

    with ExitStack() as stack:
        waiting = None
        if schedule.waiting is not None:
            waiting = stack.enter_context(Waiting(schedule.waiting, scratch, schedule.scratch))
        shelf = stack.enter_context(Shelf(schedule.kept, scratch, schedule.scratch))
        tape = Tape(shelf, log.left if log is not None else None)
        finished = log.done if log is not None else []
        seen = _forward(job, space, batches, tape, finished, schedule, waiting, tell)
        scorer = _Scorer(space, seen, log.sums() if log is not None else {})
        if log is not None:
            log.restore(tape)
        store = job.store()
        order = [layers[calls[0].layer] for calls in reversed(tape.visits)]
        budget = schedule.units if schedule.units is not None else job.unit_bytes()[1]
        ahead = stack.enter_context(Prefetcher(store, order, budget=budget))
        while tape.visits:
            calls = tape.visits.pop()
            loaded = ahead.take(layers[calls[0].layer])
            store.attach(loaded)
            scorer.visit(job, loaded, tape, calls)
            store.detach(loaded.unit)
            ahead.done(loaded)
            release_freed()
            if log is not None:
                log.add(loaded.unit.name, tape, tape.visits, scorer.sums)
            tell(f"backward {loaded.unit.name}")
    return scorer.scores()


def _forward(
    job: Job,
    space: Space,
    batches: Sequence[Tensor],
    tape: Tape,
    finished: Sequence[str],
    schedule: SearchSchedule,
    waiting: Waiting | None,
    tell: Callable[[str], None],
) -> InputStats:
    """Run all batches in lockstep, back to the last layer; return what entered the matrices."""
    model, seen = job.model, InputStats()
    watch = InputWatch(seen.visit)
    watched = {m.entry for plan in space.plans.values() for m in plan.matrices}

    def entered(loaded: Loaded) -> None:
        entries = model.state_dict(keep_vars=True)
        watch.watch({entry: entries[entry] for entry in loaded.unit.entries if entry in watched})
        if loaded.unit.is_layer:
            tape.begin()

    def leaving(loaded: Loaded, give_back: Callable[[], None]) -> None:
        give_back()
        tell(f"forward {loaded.unit.name}")

    def forward(ids_BT: Tensor) -> None:
        with streamed.rows, job.products(), watch, torch.enable_grad():
            logits_BTV = _logits(model, ids_BT)
        if logits_BTV is not None:
            torch.autograd.backward([logits_BTV], [loss_gradient(logits_BTV, ids_BT)])

    streamed = StreamedModel(
        model,
        job.store(),
        job.plan.units,
        budget=schedule.units,
        entered=entered,
        leaving=leaving,
        finished=finished,
    )
    layers = {u.name: model.get_submodule(u.name) for u in job.plan.units if u.is_layer}
    with torch.no_grad(), streamed, tape.around(layers, lambda: streamed.current):
        passes = [partial(forward, ids) for ids in batches]
        streamed.run_together(passes, waiting=waiting, ended=tape.has_ended)
    return seen


def _logits(model: Any, ids_BT: Tensor) -> Tensor | None:
    """Run a pass; None where it ended before the head."""
    with model_code(model):
        try:
            logits_BTV: Tensor = model(input_ids=ids_BT, use_cache=False).logits
        except ReachedError:
            return None
    return logits_BTV


def loss_gradient(logits_BTV: Tensor, ids_BT: Tensor) -> Tensor:
    """Return the gradient [B, T, V] of the summed negative log-likelihood of the next tokens."""
    gradient_BTV = torch.zeros_like(logits_BTV)
    step = max(1, _LOSS_CHUNK // logits_BTV.shape[-1])
    for row, ids_T in enumerate(ids_BT):
        for start in range(0, len(ids_T) - 1, step):
            here = slice(start, min(start + step, len(ids_T) - 1))
            targets_N = ids_T[1:][here]
            part_NV = logits_BTV[row, here].detach().float().requires_grad_()
            with torch.enable_grad():
                loss = functional.cross_entropy(part_NV, targets_N, reduction="sum")
            (own_NV,) = torch.autograd.grad(loss, part_NV)
            gradient_BTV[row, here] = own_NV.to(gradient_BTV.dtype)
    return gradient_BTV


class _Scorer:
    """Goes back through layers, and adds up scores on the way.

    Args:
        space: What is searched.
        seen: What entered the matrices.
        sums: The scores so far, which are added to.
    """

    def __init__(self, space: Space, seen: InputStats, sums: Sums) -> None:
        self._space = space
        self._seen = seen
        self.sums = sums

    def visit(self, job: Job, loaded: Loaded, tape: Tape, calls: Iterable[Call]) -> None:
        """Run the calls of a layer again, and score its matrices."""
        model, names, unit = job.model, job.plan.names, loaded.unit.name
        scales = input_scales(self._space, unit, self._seen.amax)
        with torch.no_grad():
            parts = layer_parts(
                self._space, loaded, scales, lambda entry: loaded.buffers[names.resolve(entry)]
            )
        watch = InputWatch(lambda site, x, batched: x, partial(self._scored, parts))
        watch.watch({e: model.get_parameter(e) for e in {site.entry for site in parts}})
        layer = model.get_submodule(unit)

        def forward(*args: object, **kwargs: object) -> object:
            with watch, model_code(model):
                return layer(*args, **kwargs)

        with job.products():  # also where `_score` multiplies
            for call in calls:
                tape.back(call, forward)

    def scores(self) -> Scores:
        """Return the sums.

        Raises:
            CalibrationError: No gradient came to a group.
        """
        scored = {group for group, _ in self.sums}
        if missing := [group.name for group in self._space.groups if group.name not in scored]:
            raise CalibrationError(
                f"no gradient of the loss came to {missing[0]!r} ({counted(len(missing), 'group')} "
                "in all): the model's predictions do not depend on it, or its products are none "
                "that are known; exclude it in the recipe"
            )
        return {
            group.name: {
                fmt: float(self.sums[group.name, fmt])
                for fmt in group.bytes
                if fmt in self._space.plans
            }
            for group in self._space.groups
        }

    def _scored(
        self,
        parts: dict[Site, list[Part]],
        site: Site,
        x: Tensor,
        changed: Tensor,
        y: Tensor,
        batched: bool,
    ) -> Tensor:
        """Return a product, which will be scored as soon as its gradient is known."""

        def scored(gradient: Tensor) -> None:
            if not batched:
                self._score(parts, site, x, gradient)
                return
            for expert, (x_e, g_e) in enumerate(zip(x, gradient, strict=True)):
                self._score(parts, Site(site.entry, expert), x_e, g_e)

        if y.requires_grad:
            y.register_hook(scored)
        return y

    def _score(
        self, parts: dict[Site, list[Part]], site: Site, x: Tensor, gradient: Tensor
    ) -> None:
        if not x.numel():
            return
        x_NK = x.detach().reshape(-1, x.shape[-1])
        g_NC = gradient.reshape(-1, gradient.shape[-1])
        for part in parts.get(site, ()):
            g_NR = g_NC[:, part.columns]
            if g_NR.shape[1] != len(part.weight):
                raise SpecError(
                    f"the model multiplies by a part of {site.entry!r}, whose product has "
                    f"{g_NC.shape[1]} columns, so it cannot be scored by gradient; exclude it in "
                    "the recipe"
                )
            for fmt, rows, difference_NR in part.differences(x_NK):
                product_NR = difference_NR.mul_(g_NR[:, rows])
                own = torch.linalg.vector_norm(product_NR, dtype=torch.float64) ** 2
                before = self.sums.get((part.group, fmt))
                self.sums[part.group, fmt] = own if before is None else before + own
