"""Settle the formats of a recipe that leaves them to a search, before a run is planned."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from modelopt_lite.auto.search import Search
from modelopt_lite.auto.space import find_space
from modelopt_lite.build import build_meta_model
from modelopt_lite.checkpoint.dequant import open_source
from modelopt_lite.device import move_buffers, pick_device
from modelopt_lite.dialects.known import dialect_names
from modelopt_lite.errors import CalibrationError, OutputError, RecipeError
from modelopt_lite.job import (
    Job,
    check_config,
    in_dialects,
    make_dialects,
    tensor_shapes,
)
from modelopt_lite.models import get_spec
from modelopt_lite.output import default_export_dir, resolve_checkpoint
from modelopt_lite.paths import asked_path
from modelopt_lite.recipes import Recipe, load_recipe
from modelopt_lite.recipes.auto import checked_bits
from modelopt_lite.request import Options, make_request
from modelopt_lite.structure import structure_of


@dataclass(frozen=True, slots=True)
class Settled:
    """What a run is asked for, its formats settled.

    Attributes:
        options: With a recipe whose formats are chosen, or stand in for those.
        notes: What a user should know.
        seconds: What a search took.
        folder: Where its scores are; None where nothing was to be chosen.
        search: Of a dry run: what a search would do, as JSON values; None without one.
    """

    options: Options
    notes: tuple[str, ...] = ()
    seconds: float = 0.0
    folder: Path | None = None
    search: dict[str, Any] | None = None


def settle(ckpt: str | Path, options: Options) -> Settled:
    """Choose the formats of a recipe, by a search where no earlier one has the scores.

    Raises:
        ModelOptLiteError: As for `quantize_and_export`.
    """
    recipe = _asked(options)
    if recipe.auto_quantize is None:
        return Settled(options)
    started = time.perf_counter()
    search = prepare_search(ckpt, options, recipe)
    _ = search.limit
    search.load_data()
    scores = search.saved()
    if scores is None:
        request = make_request(ckpt, _with_recipe(options, search.stand_in()))
        for check in request.checks():  # what would refuse the export then refuses it now
            check()
        request.job.source.close()
        scores = search.run()
    chosen, said = search.chosen(scores)
    path = search.write_recipe(chosen)
    search.job.source.close()
    note = f"{said}; the recipe is {path}"
    took = time.perf_counter() - started
    return Settled(_with_recipe(options, chosen), (note,), took, search.folder)


def settle_for_plan(ckpt: str | Path, options: Options) -> Settled:
    """Say what `settle` would choose, or, where it would have to search, what that would take.

    Raises:
        ModelOptLiteError: As for `quantize_and_export`.
    """
    recipe = _asked(options)
    if recipe.auto_quantize is None:
        return Settled(options)
    search = prepare_search(ckpt, options, recipe)
    _ = search.limit
    scores = None
    try:
        search.load_data()
        scores = search.saved()
    except CalibrationError:
        pass  # the plan of the run tells
    described = {**search.describe(), "saved": scores is not None}
    if scores is None:
        stand_in = search.stand_in()
        notes = (
            "the formats are not chosen yet: those shown stand in for them, by the sizes of "
            "matrices alone; bytes to write and predictions are of that choice",
        )
    else:
        stand_in, said = search.chosen(scores)
        notes = (said,)
    search.job.source.close()
    return Settled(_with_recipe(options, stand_in), notes, search=described)


def prepare_search(ckpt: str | Path, options: Options, recipe: Recipe) -> Search:
    """Read the source's headers, build its model without weights, and find what to choose from.

    Raises:
        ModelOptLiteError: Anything that can be known before a weight is read.
    """
    auto = recipe.auto_quantize
    assert auto is not None
    if options.numerics != "exact":
        raise RecipeError(
            f"auto_quantize searches with exact numerics, and numerics is {options.numerics!r}; "
            "search without it, then run the recipe that is written with it"
        )
    folder = resolve_checkpoint(ckpt)
    source = open_source(folder)
    model_type = check_config(source, options.model_type, folder)
    model = build_meta_model(folder, source.config, trust_remote_code=options.trust_remote_code)
    structure = structure_of(model, tensor_shapes(source), get_spec(model_type))
    dialects = dialect_names(options.dialect)
    space = find_space(
        structure,
        source,
        recipe,
        model_type=model_type,
        numerics=options.numerics,
        on_bad_shape=options.on_bad_shape,
        dialects=make_dialects(dialects, source.config),
    )
    plans = list(space.plans.values())
    for plan in plans:
        in_dialects(plan, dialects, source.config)
    device = pick_device(options.device)
    move_buffers(model, device)
    job = Job(folder, source, model, model_type, plans[0], device)
    return Search(options, recipe, auto, job, space, _folder(ckpt, options, recipe))


def _folder(ckpt: str | Path, options: Options, recipe: Recipe) -> Path:
    if options.search_dir is not None:
        return asked_path(options.search_dir, OutputError)
    target = default_export_dir(ckpt, recipe.name)
    if options.export_dir is not None:
        target = asked_path(options.export_dir, OutputError)
    return target.with_name(f"{target.name}-search")


def _asked(options: Options) -> Recipe:
    """Return the recipe that is asked for, with the bits that are.

    Raises:
        RecipeError: Bits are given for a recipe that chooses nothing, or are no number.
    """
    recipe, bits = load_recipe(options.recipe, kv_cache=options.kv_cache), options.effective_bits
    if bits is None:
        return recipe
    if recipe.auto_quantize is None:
        raise RecipeError(
            f"effective_bits is {bits}, and the formats of the recipe {recipe.name!r} are settled; "
            "give a recipe with auto_quantize"
        )
    auto = replace(recipe.auto_quantize, effective_bits=checked_bits(bits, "effective_bits"))
    return replace(recipe, auto_quantize=auto)


def _with_recipe(options: Options, recipe: Recipe) -> Options:
    """The cache's format is the recipe's own by now."""
    return replace(options, recipe=recipe, kv_cache=None, effective_bits=None)
