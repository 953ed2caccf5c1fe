"""What a search takes: memory by tier, and how often weights are read; and its schedule."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from modelopt_lite.auto.space import Space
from modelopt_lite.budgets import Budgets
from modelopt_lite.errors import RecipeError
from modelopt_lite.job import Job
from modelopt_lite.offload.hostmemory import host_memory
from modelopt_lite.offload.units import Unit, output_head
from modelopt_lite.predict import (
    Batch,
    Prediction,
    Shapes,
    resident_bytes,
    staging,
    weights_in_memory,
)

LAYERS, EMBEDDING, HEAD, OTHERS = "decoder layers", "embedding", "head", "others"
READS: Mapping[str, Mapping[str, int]] = MappingProxyType(
    {
        "gradient": {LAYERS: 2, EMBEDDING: 1, HEAD: 1, OTHERS: 1},
        "kl": {LAYERS: 1, EMBEDDING: 1, HEAD: 1, OTHERS: 2},
    }
)
"""Method -> how often a search reads units of a kind."""

_PRODUCTS = 80 << 20  # pieces of products that are looked at, and of losses
_MARGIN = 0.9  # of a budget is filled; a prediction may be off
_SHARE = 4  # without a budget, kept activations take this part of free memory before the disk


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchSchedule:
    """What is in memory when.

    Attributes:
        units: Bytes of units at a time; None: all of them.
        waiting: Bytes of activations that wait for the next layer; those beyond lie on disk.
        kept: The same of those that are kept for the way back.
        scratch: The most bytes on disk for each; None: no limit.
        notes: What is kept is noted on disk behind each layer, too, for a later search.
    """

    units: int | None = None
    waiting: int | None = None
    kept: int | None = None
    scratch: int | None = None
    notes: bool = False


def _kind(job: Job, unit: Unit) -> str:
    if unit.is_layer:
        return LAYERS
    module = job.model.get_submodule(unit.name)
    head = output_head(job.model)
    if head is not None and module is head[1]:
        return HEAD
    return EMBEDDING if module is job.model.get_input_embeddings() else OTHERS


def head_units(job: Job) -> list[Unit]:
    """Return the units outside of layers that the embedding is not."""
    return [unit for unit in job.plan.units if _kind(job, unit) in (HEAD, OTHERS)]


def predict_search(
    job: Job, space: Space, batches: Sequence[Batch], schedule: SearchSchedule
) -> Prediction:
    """Foretell a search from shapes alone.

    Args:
        job: The source and its model; its process is taken to be this one, as it is now.
        space: What is searched.
        batches: What it runs, as `fitting_batches` cuts them.
        schedule: What is in memory when.
    """
    assert space.recipe.auto_quantize is not None
    method = space.recipe.auto_quantize.method
    shapes, store = Shapes(job), job.store()
    tokens, widest = sum(map(math.prod, batches)), max(map(math.prod, batches), default=0)
    kept = tokens * shapes.hidden * _kept_states(job, space)
    waiting = tokens * shapes.waiting
    # A layer's notes are removed when those of the next one are on disk.
    noted = 2 * (kept + tokens * shapes.hidden) if schedule.notes else 0
    in_memory = [
        size if limit is None else min(size, limit)
        for size, limit in ((kept, schedule.kept), (waiting, schedule.waiting))
    ]
    of_layer: dict[str, int] = {}
    largest = 0
    for group in space.groups:
        size = sum(group.bytes[fmt] for fmt in space.plans if fmt in group.bytes)
        of_layer[group.unit] = of_layer.get(group.unit, 0) + size
        largest = max(largest, group.weights * shapes.itemsize)
    weights = weights_in_memory(job, store, job.plan.units, schedule.units)
    work = {
        "weights": max(weights, sum(map(store.bytes_of, head_units(job))) * (method == "kl")),
        "a layer in all formats": max(of_layer.values(), default=0),
        "waiting activations": in_memory[1] + widest * shapes.waiting,
        "logits": 3 * widest * job.vocab_size * shapes.itemsize,
        "products": _PRODUCTS,
        "compiled kernels": 2 * shapes.kernels,
    }
    if method == "gradient":
        work["the graph of a layer"] = max((_graph(job, shapes, b) for b in batches), default=0)
    else:
        work["running activations"] = max(map(shapes.running, batches), default=0)
        work["a group as it was"] = largest
    return Prediction(
        process={
            "process": resident_bytes(),
            "reading": staging(job),
            "kept activations": in_memory[0],
        },
        work=work,
        on_host=job.device.type == "cpu",
        disk_scratch=kept + waiting - sum(in_memory) + noted,
        bytes_read=sum(
            READS[method][_kind(job, unit)] * _stored_bytes(job, unit) for unit in job.plan.units
        ),
        bytes_written=0,
    )


def _kept_states(job: Job, space: Space) -> int:
    """How many hidden states of a token are put away: of each layer, or of each variant."""
    assert space.recipe.auto_quantize is not None
    if space.recipe.auto_quantize.method == "gradient":
        return 1 + sum(unit.is_layer for unit in job.plan.units)
    return sum(len(space.plans.keys() & group.bytes.keys()) for group in space.groups)


def _stored_bytes(job: Job, unit: Unit) -> int:
    """Bytes of the source that a unit's weights are read from."""
    names = job.plan.names
    groups = (names.by_target.get(names.resolve(entry)) for entry in unit.entries)
    read = dict.fromkeys(name for group in groups if group for name in group.sources)
    return sum(info.nbytes for name in read for info in job.source.stored(name))


def _graph(job: Job, shapes: Shapes, batch: Batch) -> int:
    """Bytes that autograd holds of a layer: what enters each matrix, and what it makes of it.

    Each output is held up to three times, by an activation or a rotation and by products with
    others; norms keep their inputs in float32; and the same again is on its way back.
    """
    of_layer: dict[str, float] = {}
    for m in job.plan.matrices:
        used = 1.0 if m.experts is None else shapes.used
        rows, columns = m.shape[-2:] if not (m.stacked and m.input_major) else m.shape[:-3:-1]
        count = m.shape[0] if len(m.shape) == 3 else 1
        of_layer[m.unit] = of_layer.get(m.unit, 0) + used * count * (columns + 3 * rows)
    widest = max(of_layer.values(), default=0)
    return math.prod(batch) * int(shapes.itemsize * widest + 24 * shapes.hidden) + shapes.running(
        batch
    )


def make_search_schedule(
    job: Job,
    space: Space,
    batches: Sequence[Batch],
    budgets: Budgets,
    *,
    stream: bool,
    notes: bool,
) -> SearchSchedule:
    """Decide what is in memory when, so that a search keeps to its budgets.

    Without a budget a quarter of the free memory is for activations. The rest lies on disk. Where
    ``notes``, what is kept is noted there besides.

    Raises:
        RecipeError: The budgets cannot be met.
    """
    least = SearchSchedule(
        units=job.unit_bytes()[0] if stream else None,
        waiting=0,
        kept=0,
        scratch=budgets.disk,
        notes=notes,
    )
    foretold = predict_search(job, space, batches, least)
    if budgets.disk is not None:  # what does not fit on disk stays in memory
        foretold = replace(foretold, disk_scratch=0)
    budgets.check(foretold)
    on_host = job.device.type == "cpu"
    pairs = (budgets.host, foretold.host_peak), (budgets.device, foretold.work_peak)
    spare = [int(_MARGIN * have) - need for have, need in pairs[: 1 + on_host] if have is not None]
    room, units = max(0, min(spare, default=host_memory()[0] // _SHARE)), least.units
    if not spare and stream:
        units = job.unit_bytes()[1]
    everything = predict_search(job, space, batches, replace(least, waiting=None, kept=None))
    waiting = min(everything.work["waiting activations"], room // 2)
    schedule = replace(least, units=units, waiting=waiting, kept=room - waiting)
    scratch = predict_search(job, space, batches, schedule).disk_scratch
    if budgets.disk is not None and scratch > budgets.disk:
        raise RecipeError(
            f"disk_scratch is {budgets.disk:,} bytes, and the search needs {scratch:,} for "
            "activations beside host_memory"
            f"{' and for what a later search goes on with' if notes else ''}; give more of either, "
            f"{'search with resume=False (--no-resume), ' if notes else ''}or give less to "
            "calibrate with (calib_size, calib_seq_len)"
        )
    return schedule
