"""Score formats by what they do to the model's predictions, one group of matrices at a time.

The score of a format is the Kullback-Leibler divergence of next-token predictions, summed over
tokens, of the model with one group in that format from the model as it is. Every such variant of
the model is the model itself up to the layer of its group. So all of them go through the layers
together: in the layer of its group a variant branches off, in the layers behind it runs on what it
had become; each layer is read once. What variants have become lies on a shelf between layers.

Source: the scoring by divergence of NVIDIA Model Optimizer's AutoQuantize, which runs the whole
model once for each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial, wraps
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from modelopt_lite.auto.outlook import SearchSchedule, head_units
from modelopt_lite.auto.rounded import Part, input_scales, layer_parts
from modelopt_lite.auto.space import Scores, Space
from modelopt_lite.auto.variant_log import Became, Variant, VariantLog
from modelopt_lite.calibrate.model_code import model_code
from modelopt_lite.calibrate.observe import InputStats, InputWatch, Site
from modelopt_lite.errors import InternalError, SpecError
from modelopt_lite.job import Job
from modelopt_lite.offload.forwards import running
from modelopt_lite.offload.shelf import Kept, Shelf
from modelopt_lite.offload.store import Loaded
from modelopt_lite.offload.stream import StreamedModel
from modelopt_lite.offload.waiting import Waiting
from modelopt_lite.pipeline import without_head
from modelopt_lite.predictions import token_divergences
from modelopt_lite.progress import Progress

_CHUNK = 1 << 21  # logits that are float64 at a time: 16 MiB


def kl_scores(
    job: Job,
    space: Space,
    batches: Sequence[Tensor],
    *,
    schedule: SearchSchedule,
    scratch: Path,
    progress: Progress,
    log: VariantLog | None = None,
) -> Scores:
    """Return the score of every format of every group.

    Decoder layers, the embedding and the head are read once, norms outside of layers twice.

    Args:
        job: The source and its model, on the meta device.
        space: What is searched.
        batches: Token ids [B, T], on the model's device.
        schedule: What is in memory when.
        scratch: Folder of what is put away on disk.
        progress: Told how far it is.
        log: Where each layer that is done is noted, and was by an earlier search.

    Raises:
        CalibrationError: A group saw no token.
        SpecError: The model computes with a layer's output other than in the next layer.
    """
    with ExitStack() as stack:
        waiting = None
        if schedule.waiting is not None:
            waiting = stack.enter_context(Waiting(schedule.waiting, scratch, schedule.scratch))
        shelf = stack.enter_context(Shelf(schedule.kept, scratch, schedule.scratch))
        stack.enter_context(torch.no_grad())
        variants = _Variants(job, space, shelf, [_Pass() for _ in batches])
        _through_layers(job, batches, variants, schedule, waiting, progress, log)
        return _at_the_head(job, space, batches, variants, shelf)


@dataclass(slots=True)
class _Pass:
    """What a pass has become behind its last layer.

    Attributes:
        calls: How many calls of layers it has made.
        runs_again: The layer that runs has run once already.
        returned: The tensors that the last call returned, in the model itself,
        others: and what stood there that is none;
        structure: how they were arranged;
        became: and the same tensors in each variant.
    """

    calls: int = 0
    runs_again: bool = False
    returned: dict[int, Tensor] = field(default_factory=dict)
    others: list[Any] = field(default_factory=list)
    structure: TreeSpec | None = None
    became: dict[Variant, dict[int, Kept]] = field(default_factory=dict)


class _Variants:
    """Runs each layer for the model itself and for all variants of it."""

    def __init__(self, job: Job, space: Space, shelf: Shelf, passes: list[_Pass]) -> None:
        self._job = job
        self._space = space
        self._shelf = shelf
        self.passes = passes
        self._seen = InputStats()
        self._stats = InputWatch(self._seen.visit)
        self._watched = {m.entry for plan in space.plans.values() for m in plan.matrices}
        self._parts: dict[Site, list[Part]] = {}

    def entered(self, loaded: Loaded) -> None:
        """Look at what enters a layer's matrices in its first run."""
        entries = self._job.model.state_dict(keep_vars=True)
        self._stats.watch({e: entries[e] for e in loaded.unit.entries if e in self._watched})

    def again(self, loaded: Loaded) -> None:
        """Quantize a layer, now that its scales of inputs are known."""
        names = self._job.plan.names
        scales = input_scales(self._space, loaded.unit.name, self._seen.amax)
        self._parts = layer_parts(
            self._space, loaded, scales, lambda entry: loaded.buffers[names.resolve(entry)]
        )

    def left(self) -> None:
        """Let go of a layer."""
        self._parts = {}

    def became(self) -> Iterator[Became]:
        """Yield what each pass has become in each variant, on the host."""
        for index, own in enumerate(self.passes):
            for variant, kept in own.became.items():
                yield index, variant, {at: self._shelf.look(value) for at, value in kept.items()}

    def restore(self, became: Iterable[Became]) -> None:
        """Take what passes had become in an earlier search."""
        for index, variant, values in became:
            self.passes[index].became[variant] = {a: self._shelf.put(v) for a, v in values.items()}

    def resumed(self, index: int, calls: int, output: Any) -> Any:
        """Return a layer's output of an earlier search, as a pass goes on with it."""
        self.passes[index].calls = calls
        return _known(self.passes[index], output)

    def around(self, forward: Callable[..., Any], current: Callable[[], int]) -> Callable[..., Any]:
        """Return a layer's forward that runs all variants, too, in its second run."""

        @wraps(forward)
        def run(*args: Any, **kwargs: Any) -> Any:
            own = self.passes[current()]
            with torch.no_grad():
                if not own.runs_again:
                    own.runs_again = True
                    with self._stats:
                        return forward(*args, **kwargs)
                own.runs_again = False
                return self._run(own, forward, args, kwargs)

        return run

    def _run(self, own: _Pass, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        values, structure = tree_flatten((args, kwargs))
        taken = _taken(values, own)
        values = [v.detach() if isinstance(v, Tensor) else v for v in values]
        became: dict[Variant, dict[int, Kept]] = {}

        def kept(inputs: list[Any]) -> dict[int, Kept]:
            args, kwargs = tree_unflatten(inputs, structure)
            made, _ = tree_flatten(forward(*args, **kwargs))
            return {at: self._shelf.put(value) for at, value in _floating(made).items()}

        for variant, before in own.became.items():
            inputs = list(values)
            entering = {at: self._shelf.take(value) for at, value in before.items()}
            for at, output in taken.items():
                inputs[at] = entering[output]
            became[variant] = kept(inputs)
        groups = dict.fromkeys(p.group for parts in self._parts.values() for p in parts)
        for group in groups:
            for fmt in self._formats(group):
                with self._rounded(group, fmt):
                    became[group, fmt] = kept(values)
        args, kwargs = tree_unflatten(values, structure)
        made = forward(*args, **kwargs)
        own.calls += 1
        own.became = became
        return _known(own, made)

    def _formats(self, group: str) -> list[str]:
        parts = (part for parts in self._parts.values() for part in parts if part.group == group)
        return list(next(parts).rounded)

    @contextmanager
    def _rounded(self, group: str, fmt: str) -> Iterator[None]:
        """Have a group's matrices rounded, and what enters them."""
        mine = {
            site: [part for part in parts if part.group == group]
            for site, parts in self._parts.items()
        }

        def visit(site: Site, x: Tensor, batched: bool) -> Tensor | None:
            if batched:
                rows = [visit(Site(site.entry, e), part, False) for e, part in enumerate(x)]
                return torch.stack(
                    [x_e if r is None else r for r, x_e in zip(rows, x, strict=True)]
                )
            if not mine.get(site) or not x.numel():
                return None
            rounded = mine[site][0].rounded[fmt]
            return rounded.format.fake_quantize_input(x, rounded.input_scale)

        watch = InputWatch(visit)
        model = self._job.model
        watch.watch({e: model.get_parameter(e) for e in {s.entry for s, p in mine.items() if p}})
        parts = [part for parts in mine.values() for part in parts]
        before = [part.target.clone() for part in parts]
        for part in parts:
            rounded = part.rounded[fmt]
            codec = rounded.format.codec
            part.target.copy_(codec.dequantize(rounded.tensors, part.target.dtype))
        try:
            with watch:
                yield
        finally:
            for part, value in zip(parts, before, strict=True):
                part.target.copy_(value)


def _known(own: _Pass, output: Any) -> Any:
    """Return a layer's output, its tensors such that what is computed with them shows."""
    own.others, own.structure = tree_flatten(output)
    with torch.enable_grad():
        own.returned = {at: v.detach().requires_grad_() for at, v in _floating(own.others).items()}
    return tree_unflatten(
        [own.returned.get(at, v) for at, v in enumerate(own.others)], own.structure
    )


def _taken(values: Sequence[Any], own: _Pass) -> dict[int, int]:
    """Return which of the values that enter a layer are which of what the last one returned.

    Raises:
        SpecError: Some were computed from those, between layers.
    """
    taken: dict[int, int] = {}
    for at, value in _floating(values).items():
        if not value.requires_grad:
            continue
        found = [output for output, returned in own.returned.items() if returned is value]
        if not found:
            raise SpecError(
                "the model computes between its layers with what they return, so that variants of "
                "it cannot be told apart by layers; use method: gradient"
            )
        taken[at] = found[0]
    return taken


def _floating(values: Sequence[Any]) -> dict[int, Tensor]:
    return {at: v for at, v in enumerate(values) if isinstance(v, Tensor) and v.is_floating_point()}


def _through_layers(
    job: Job,
    batches: Sequence[Tensor],
    variants: _Variants,
    schedule: SearchSchedule,
    waiting: Waiting | None,
    progress: Progress,
    log: VariantLog | None,
) -> None:
    """Run all batches and variants in lockstep, up to the head."""
    model, done = job.model, [0]
    noted: dict[str, Any] = {}
    if log is not None:
        variants.restore(log.variants())
        noted = {"replay": log.replay(variants.resumed), "returned": log.returned}

    def leaving(loaded: Loaded, give_back: Callable[[], None]) -> None:
        variants.left()
        give_back()
        if log is not None and loaded.unit.is_layer:
            log.finish(loaded.unit.name, variants.became())
        done[0] += 1
        progress(f"unit {loaded.unit.name}", min(done[0], len(units)), len(units))

    def forward(ids_BT: Tensor) -> None:
        with streamed.rows, model_code(model), torch.enable_grad():
            model(input_ids=ids_BT, use_cache=False)

    with without_head(model, job.plan) as skipped:
        units = [unit for unit in job.plan.units if unit.name not in skipped]
        streamed = StreamedModel(
            model,
            job.store(),
            units,
            budget=schedule.units,
            entered=variants.entered,
            leaving=leaving,
            again=variants.again,
            finished=log.done if log is not None else (),
        )
        layers = {u.name: model.get_submodule(u.name) for u in units if u.is_layer}
        with (
            running(
                {m: variants.around(m.forward, lambda: streamed.current) for m in layers.values()}
            ),
            streamed,
        ):
            passes = [partial(forward, ids) for ids in batches]
            streamed.run_together(passes, waiting=waiting, **noted)


def _at_the_head(
    job: Job, space: Space, batches: Sequence[Tensor], variants: _Variants, shelf: Shelf
) -> Scores:
    """Predict from what passes and variants have become, and compare."""
    model, store = job.model, job.store()
    loaded = [store.load(unit) for unit in head_units(job)]
    for unit in loaded:
        store.attach(unit)
    embedding = model.get_input_embeddings()
    blank = embedding.weight

    def embedded(ids: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return torch.zeros(*ids.shape, blank.shape[-1], dtype=blank.dtype, device=ids.device)

    sums: dict[Variant, float] = {}
    for ids_BT, own in zip(batches, variants.passes, strict=True):
        final = {at: value.detach() for at, value in own.returned.items()}
        exact_BTV = _logits(model, job, embedding, embedded, ids_BT, own, final)
        for variant, kept in own.became.items():
            ended = {at: shelf.take(value) for at, value in kept.items()}
            logits_BTV = _logits(model, job, embedding, embedded, ids_BT, own, ended)
            sums[variant] = sums.get(variant, 0.0) + divergence(exact_BTV, logits_BTV)
    for unit in loaded:
        store.detach(unit.unit)
        store.release(unit)
    return {
        group.name: {f: sums[group.name, f] for f in group.bytes if f in space.plans}
        for group in space.groups
    }


def _logits(
    model: Any,
    job: Job,
    embedding: nn.Module,
    embedded: Callable[..., Tensor],
    ids_BT: Tensor,
    own: _Pass,
    final: dict[int, Tensor],
) -> Tensor:
    """Run the model around its layers, of which the last one returns what is given.

    Those before it return NaN, so that a model that uses them past the next layer shows.
    """
    calls, structure = [0], own.structure
    if structure is None:
        raise InternalError("a pass ran through no layer")

    def stub(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        last = calls[0] == own.calls
        given = {at: v if last else torch.full_like(v, torch.nan) for at, v in final.items()}
        return tree_unflatten([given.get(at, v) for at, v in enumerate(own.others)], structure)

    layers = [model.get_submodule(unit.name) for unit in job.plan.units if unit.is_layer]
    forwards: dict[nn.Module, Callable[..., Any]] = dict.fromkeys(layers, stub)
    with running({**forwards, embedding: embedded}), model_code(model):
        logits: Tensor = model(input_ids=ids_BT, use_cache=False).logits
    if bool(torch.isnan(logits).any()):
        raise SpecError(
            "the model uses what a layer returns past the next layer, or predicts NaN, so that "
            "variants of it cannot be told apart by layers; use method: gradient"
        )
    return logits


def divergence(exact_BTV: Tensor, other_BTV: Tensor) -> float:
    """Return the divergence of other predictions from exact ones, summed over tokens, in nats.

    In float64: a good format's is so small that float32 would lose it among its roundings.
    """
    total = torch.zeros((), dtype=torch.float64, device=exact_BTV.device)
    exact_NV, other_NV = exact_BTV.flatten(0, -2), other_BTV.flatten(0, -2)
    step = max(1, _CHUNK // exact_NV.shape[1])
    for start in range(0, len(exact_NV), step):
        log_p_NV = functional.log_softmax(exact_NV[start : start + step].double(), dim=-1)
        log_q_NV = functional.log_softmax(other_NV[start : start + step].double(), dim=-1)
        total += token_divergences(log_p_NV, log_q_NV).sum()
    return float(total)
