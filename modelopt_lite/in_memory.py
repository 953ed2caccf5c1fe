"""For people with a model in memory and a loop of their own: `quantize`, then `export_hf`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from modelopt_lite.build import eager_experts, quiet_transformers
from modelopt_lite.calibrate.algorithms import make_algorithm
from modelopt_lite.calibrate.attention import watch_attention
from modelopt_lite.calibrate.evidence import Evidence
from modelopt_lite.calibrate.observe import InputWatch
from modelopt_lite.calibrate.statistics import Statistics
from modelopt_lite.checkpoint.behind import WriteBehind
from modelopt_lite.checkpoint.dequant import open_source
from modelopt_lite.checkpoint.writer import parse_size
from modelopt_lite.checkpoint.writers import ExportWriter
from modelopt_lite.device import pick_device
from modelopt_lite.dialects.known import dialect_names
from modelopt_lite.errors import CalibrationError, OutputError, RecipeError
from modelopt_lite.export.exporter import Exporter
from modelopt_lite.export.quantize import check_finite
from modelopt_lite.formats.base import Numerics
from modelopt_lite.job import (
    Job,
    check_config,
    in_dialects,
    tensor_shapes,
)
from modelopt_lite.models import get_spec
from modelopt_lite.output import check_export_dir, check_free_space, resolve_checkpoint, staged
from modelopt_lite.paths import asked_path
from modelopt_lite.plan import make_plan
from modelopt_lite.recipes import Recipe, load_recipe
from modelopt_lite.report import Report
from modelopt_lite.run import Run, cache_stats, fill_report, run_details
from modelopt_lite.structure import structure_of

_STATE = "_modelopt_lite_calibration"


@dataclass(frozen=True, slots=True)
class _Calibration:
    recipe: Recipe
    numerics: Numerics
    on_bad_shape: str
    evidence: Evidence


def quantize(
    model: nn.Module,
    recipe: str | Path | Recipe,
    forward_loop: Callable[[nn.Module], Any] | None = None,
    *,
    kv_cache: str | None = None,
    numerics: Numerics = "exact",
    on_bad_shape: Literal["error", "skip"] = "error",
) -> nn.Module:
    """Calibrate a model that is in memory, with a loop of one's own; `export_hf` then writes it.

    Args:
        model: A transformers model. Its weights and its forward are left as they are.
        recipe: As for `quantize_and_export`.
        forward_loop: Called once with the model; what its products read is what is calibrated.
            None for recipes that need no calibration.
        kv_cache: As for `quantize_and_export`.
        numerics: As for `quantize_and_export`.
        on_bad_shape: As for `quantize_and_export`.

    Returns:
        The same model, which now carries its statistics.
    """
    chosen = load_recipe(recipe, kv_cache=kv_cache)
    if chosen.auto_quantize is not None:
        raise RecipeError(
            f"the formats of the recipe {chosen.name!r} are not chosen yet; search them with "
            "quantize_and_export, and give the recipe that it writes"
        )
    algorithm = make_algorithm(chosen.algorithm, numerics)
    evidence = Evidence(cache=cache_stats(chosen, numerics))
    if algorithm is not None and (algorithm.sequential or algorithm.rounded):
        needs = "the quantized ones" if algorithm.sequential else "layers with rounded inputs"
        raise RecipeError(
            f"{chosen.algorithm.method} calibrates each layer on what {needs} before it put out, "
            "which a loop over the whole model cannot; use quantize_and_export"
        )
    if algorithm is not None:
        evidence.statistics = Statistics(algorithm.kinds, None, algorithm.row_limit)
    if forward_loop is not None:
        watch = InputWatch(evidence.visit)
        watch.watch({n: p for n, p in model.named_parameters() if p.ndim in (2, 3)})
        with (
            eager_experts(model),
            watch_attention(model, evidence.cache.visit),
            torch.no_grad(),
            watch,
        ):
            forward_loop(model)
    setattr(model, _STATE, _Calibration(chosen, numerics, on_bad_shape, evidence))
    return model


def export_hf(
    model: nn.Module,
    export_dir: str | Path,
    *,
    source: str | Path,
    max_shard_size: str | int = "10GB",
    dialect: str | Sequence[str] = "modelopt",
    overwrite: bool = False,
    verify: bool = True,
) -> Report:
    """Write a model that `quantize` calibrated; the same bytes as `quantize_and_export`.

    Args:
        model: The model, with its weights in memory.
        export_dir: Where to write.
        source: The checkpoint it was loaded from: its names, config and other files are kept.
        max_shard_size: Largest weight file.
        dialect: As for `quantize_and_export`.
        overwrite: Replace a folder that is not empty.
        verify: As for `quantize_and_export`.

    Raises:
        CalibrationError: The model did not come through `quantize`.
        ModelOptLiteError: As for `quantize_and_export`.
    """
    state = getattr(model, _STATE, None)
    if not isinstance(state, _Calibration):
        raise CalibrationError(
            "the model carries no statistics; call quantize(model, recipe, forward_loop) first"
        )
    folder, target = resolve_checkpoint(source), asked_path(export_dir, OutputError)
    on_disk = open_source(folder)
    model_type = check_config(on_disk, None, folder)
    tensors = tensor_shapes(on_disk)
    with quiet_transformers():
        structure = structure_of(model, tensors, get_spec(model_type))
    plan = make_plan(
        structure,
        tensors,
        state.recipe,
        model_type=model_type,
        numerics=state.numerics,
        on_bad_shape=state.on_bad_shape,
    )
    plan.notes += on_disk.notes
    plan, *also = in_dialects(plan, dialect_names(dialect), on_disk.config)
    job = Job(folder, on_disk, model, model_type, plan, pick_device("cpu"), tuple(also))
    check_export_dir(target, folder, overwrite=overwrite)
    layout = job.layout(parse_size(max_shard_size))
    check_free_space(target, layout.total_bytes + job.sidecar_bytes())
    details = run_details(job, None, {"in_memory": True})
    report = Report(str(target), state.recipe.name, model_type, details=details)
    run = Run(job, None, report, verify, lambda phase, done, total: None)
    with staged(target, overwrite=overwrite) as work:
        with ExportWriter(work, layout) as writer:
            with WriteBehind(writer) as sink, torch.no_grad():
                exporter = Exporter([*job.plans.values()], on_disk, sink, state.evidence, verify)
                for unit in plan.units:
                    values = _in_memory(model, job, unit.entries)
                    exporter.export(unit, values, check_finite(values))
                exporter.export_rest(plan.units)
            writer.finish()
        fill_report(report, job, exporter, state.evidence, layout)
        run.finish(work)
    return report


def _in_memory(model: nn.Module, job: Job, entries: tuple[str, ...]) -> dict[str, Tensor]:
    """Return, by name on disk, the values that the model holds, in the dtype of the disk."""
    state = model.state_dict(keep_vars=True)
    values: dict[str, Tensor] = {}
    for entry in entries:
        group = job.plan.names.by_target.get(entry)
        if group is None:
            continue
        for piece in group.pieces:
            value = state[entry].detach()
            value = value[piece.region] if piece.region else value
            values[piece.source] = value.to(job.source.tensors[piece.source].dtype)
        if group.convert is not None:
            values.update({name: job.source.read(name) for name in group.sources})
    return values
