"""Divide the experts of a prepared run over ranks."""

from __future__ import annotations

import importlib.metadata
from functools import reduce
from math import gcd

from modelopt_lite.calibrate.observe import Site
from modelopt_lite.errors import RecipeError, SpecError
from modelopt_lite.job import Job, layer_parts, split_layers
from modelopt_lite.offload.expert_parts import joined
from modelopt_lite.parallel.degrees import Degrees, choose_degrees
from modelopt_lite.parallel.spec import check_plan, check_supported, whole_experts


def experts_of_layers(job: Job) -> dict[str, int]:
    """Return the containers of routed experts that can be sharded, and how many each has."""
    if job.model is None:
        return {}
    parts = (
        part
        for unit in joined(job.plan.units)
        if unit.is_layer
        for part in layer_parts(unit, job.plan, job.model, 1, stacks=True)[1:]
    )
    return {part.container: part.count for part in parts}


def degrees_for(job: Job, world_size: int, ep: int | None) -> Degrees:
    """Choose the degrees of a run.

    Raises:
        RecipeError: What the user asks for cannot be, or the recipe runs in one process only.
        SpecError: The model's experts cannot be sharded.
    """
    if world_size == 1 and ep is None:
        return Degrees(1, 1)
    if not job.plan.needs_calibration:  # no pass, no experts: runs of tensors are dealt out
        if ep is not None:
            job.plan.notes.append(f"ep={ep} counts for nothing: the recipe needs no data")
        return Degrees(1, world_size)
    if world_size > 1:
        _check_joined(job)
    counts = experts_of_layers(job)
    together = {m.experts: m.name for m in job.plan.matrices if m.experts}
    degrees = choose_degrees(world_size, reduce(gcd, counts.values(), 0), ep)
    if ep == 1 or (degrees.ep == 1 and not together):
        return degrees
    spec = job.plan.spec
    if degrees.ep > 1 or not counts:
        version = importlib.metadata.version("transformers")
        check_supported(spec, job.model_type, version)
    if not counts:
        raise SpecError(
            f"the experts of {job.model_type!r} cannot be sharded: they are no rows of tensors on "
            f"disk, nor made of tensors of their own ({next(iter(together.values()))}); run it in "
            "one process, or give ep=1 (--ep 1): every rank then holds all experts"
        )
    return degrees


def stacked_layers(job: Job) -> set[str | None]:
    """Return the layers whose experts come in parts and stay one tensor, made of all of them."""
    whole = {m.entry for m in job.plan.matrices if m.stacked and not m.region}
    parts = (unit for unit in job.plan.units if unit.of_stack)
    return {unit.parent for unit in parts if not whole.isdisjoint(unit.entries)}


def expert_sites(job: Job) -> dict[Site, tuple[int, int]]:
    """Return where inputs of sharded experts are seen: the number, and how many there are."""
    found: dict[Site, tuple[int, int]] = {}
    for part in job.plan.units:
        for entry in part.entries if part.parent is not None else ():
            if part.is_stacked:
                for number in part.experts or ():
                    found[Site(entry, number)] = number, part.count
            else:
                number = int(entry.removeprefix(f"{part.container}.").partition(".")[0])
                found[Site(entry)] = number, part.count
    return found


def _check_joined(job: Job) -> None:
    """Refuse what needs more of all ranks than they tell each other."""
    if job.runs_twice:
        raise RecipeError(
            f"{job.plan.recipe.name} with numerics={job.plan.numerics!r} runs all batches a second "
            "time with rounded inputs, which several ranks do not do; run it in one process, or "
            "with exact numerics"
        )


def shard(job: Job, degrees: Degrees, rank: int) -> None:
    """Have a job bring in what one rank owns; may be called again for another rank.

    Raises:
        SpecError: The model's plan does not say that what would be sharded are experts.
    """
    job.degrees, job.rank = degrees, rank
    if not job.plan.needs_calibration:
        return
    if degrees.ep == 1:
        held = whole_experts(job.plan.spec, (name for name, _ in job.model.named_parameters()))
        if held:
            job.plan.notes.append(
                f"every rank holds all experts, {held[0]!r} among them: sharding was ruled out"
            )
        return
    job.share = reduce(gcd, experts_of_layers(job).values()) // degrees.ep
    for plan in job.plans.values():
        split_layers(plan, job.model, job.share, stacks=True)
    sharded = {entry for unit in job.plan.units if unit.experts for entry in unit.entries}
    check_plan(job.model, job.plan.spec, sorted(sharded))
