"""Say what a run would do, and whether it would be refused; reads no weight, writes nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from modelopt_lite.auto.settle import settle_for_plan
from modelopt_lite.checkpoint.names import natural_key
from modelopt_lite.checkpoint.writer import parse_size
from modelopt_lite.errors import (
    CalibrationError,
    ModelOptLiteError,
    RecipeError,
    StrategyComputeError,
)
from modelopt_lite.predict import BANDWIDTH, Prediction
from modelopt_lite.report import Report
from modelopt_lite.request import Options, Request, make_request
from modelopt_lite.sharding import experts_of_layers


def dry_run(
    ckpt: str | Path,
    model_type: str | None = None,
    *,
    read_bandwidth: str | int = BANDWIDTH,
    write_bandwidth: str | int = BANDWIDTH,
    world_size: int = 1,
    **options: Any,
) -> dict[str, Any]:
    """Say what `quantize_and_export` with the same arguments would do.

    The calibration data are read and checked, too.

    Args:
        ckpt: Folder of a Hugging Face checkpoint, or a hub id.
        model_type: Must equal that of config.json, where given.
        read_bandwidth: Of the source's disk, a second: "1.5GB", or bytes.
        write_bandwidth: Of the export's disk.
        world_size: How many processes would run it; none is started. ``parallel`` in the result
            then has the degrees, and the experts, memory and bytes of each rank.
        options: As `quantize_and_export` takes them, with the same defaults.

    Returns:
        JSON values. ``linears`` has each linear layer and expert once: with ``format`` and
        ``shape``, or with ``excluded``, the reason. Sizes are in bytes. ``problems`` lists why
        the run would be refused, each with the ``code`` of the error and its ``message``;
        ``offload`` is what `plan_offload` finds for inference, where the plan has a model;
        ``search`` says what choosing the formats would take, and is None where they are settled;
        ``reuses_export`` is true where it would return the report of a finished export.

    Raises:
        ModelOptLiteError: There is no plan: what is wrong, the value, and what to do.
    """
    settled = settle_for_plan(ckpt, Options(model_type=model_type, **options))
    request = make_request(ckpt, settled.options, world_size=world_size)
    request.job.plan.notes.extend(settled.notes)
    notes: list[str] = []
    problems = list(_load_data(request, notes))
    reused = None
    try:
        reused = request.finished()
    except ModelOptLiteError as error:
        problems.append(error)
    else:
        problems += _failures(request) if reused is None else []
    if reused is not None:
        with suppress(RecipeError):  # nothing is run, so no budget can be exceeded
            request.make_schedule()
    prediction = request.prediction()
    described = _describe(request, prediction)
    described["predicted"] = prediction.to_json(
        parse_size(read_bandwidth), parse_size(write_bandwidth)
    )
    described["parallel"] = _parallel(request)
    described["search"] = settled.search
    described["reuses_export"] = reused is not None
    described["notes"] += [*notes, *request.notes, *_reuse(request, reused)]
    described["problems"] = [{"code": e.code, "message": str(e)} for e in problems]
    return described


def _load_data(request: Request, notes: list[str]) -> Iterator[ModelOptLiteError]:
    try:
        request.load_data()
    except CalibrationError as error:
        if request.options.calib_data is not None:
            yield error
        else:  # who plans may not have chosen yet
            notes.append(f"calibration needs data to be given: {error}")


def _failures(request: Request) -> Iterator[ModelOptLiteError]:
    for check in request.checks():
        try:
            check()
        except ModelOptLiteError as error:
            yield error


def _reuse(request: Request, reused: Report | None) -> list[str]:
    if reused is None:
        return []
    return [
        f"{request.target} holds the finished export of the same inputs: a run returns its report "
        "and does nothing else; overwrite=True (--overwrite) makes it again"
    ]


def _describe(request: Request, prediction: Prediction) -> dict[str, Any]:
    job, layout = request.job, request.layout
    plan = job.plan
    linears: dict[str, dict[str, Any]] = {
        m.name: {"format": m.format, "shape": list(m.shape), "input_group": m.input_group}
        for m in plan.matrices
    }
    linears |= {name: {"excluded": reason} for name, reason in plan.excluded.items()}
    return {
        "checkpoint": str(job.folder),
        "model_type": job.model_type,
        "has_spec": plan.spec is not None,
        "export_dir": str(request.target),
        "recipe": plan.recipe.name,
        "formats": [fmt.name for fmt in plan.formats],
        "numerics": plan.numerics,
        "kv_cache": plan.recipe.kv_cache,
        "kv_cache_layers": len(plan.kv_cache),
        "needs_calibration": plan.needs_calibration,
        "calibration": None
        if request.data is None
        else {
            "origin": request.data.origin,
            "samples": request.data.samples,
            "tokens": request.data.tokens,
        },
        "linears": {name: linears[name] for name in sorted(linears, key=natural_key)},
        "source_tensors": len(job.source.tensors),
        "dialects": [p.dialect.name for p in job.plans.values()],
        "outputs": sum(len(part.tensors) for part in layout.parts.values()),
        "bytes_to_read": prediction.bytes_read,
        "bytes_to_write": prediction.bytes_written,
        "files_to_write": list(layout.paths),
        "budgets": asdict(request.budgets),
        "schedule": asdict(request.schedule),
        "device": str(job.device),
        "units": _units(request),
        "offload": _offload(request),
        "notes": [*plan.fallbacks, *dict.fromkeys(n for p in job.plans.values() for n in p.notes)],
    }


def _parallel(request: Request) -> dict[str, Any] | None:
    """Degrees, and what each rank holds and reads; None for one process."""
    job = request.job
    if (degrees := job.degrees) is None:
        return None
    counts = experts_of_layers(job)
    ranks = []
    for rank in range(degrees.world_size):
        job.rank = rank  # all ranks have the same schedule: their shares are of one size
        predicted = request.prediction()
        experts = {n: degrees.experts_of(rank, n) for n in dict.fromkeys(counts.values())}
        ranks.append(
            {
                "rank": rank,
                "experts": {str(n): [own.start, own.stop] for n, own in experts.items()},
                "host": predicted.host_peak,
                "device": predicted.device_peak,
                "bytes_read": predicted.bytes_read,
            }
        )
    return {"ep": degrees.ep, "edp": degrees.edp, "layers": len(counts), "ranks": ranks}


def _offload(request: Request) -> dict[str, Any] | None:
    """How `offload()` would run the model for inference; None where there is only a list of names.

    ``refused`` has the reason where ``budgets.device`` is too little for that.
    """
    if request.job.model is None:
        return None
    from modelopt_lite.offload.auto import plan_offload

    try:
        plan = plan_offload(request.job.model, request.job.model_type, request.budgets.device)
    except StrategyComputeError as error:
        return {"refused": str(error), "smallest_budget": error.smallest_budget}
    return {
        "units": dict(plan.units),
        "resident": dict(plan.resident),
        "layer_classes": list(plan.layer_classes),
        "moe_blocks": dict(plan.moe_blocks),
        "expert_groups": [asdict(group) for group in plan.expert_groups],
        "ep_bytes": {str(degree): size for degree, size in plan.ep_bytes.items()},
        "include_patterns": plan.config.include_patterns,
        "exclude_patterns": plan.config.exclude_patterns,
        "notes": list(plan.notes),
    }


def _units(request: Request) -> list[dict[str, Any]]:
    job = request.job
    return [
        {"name": unit.name, "is_layer": unit.is_layer, "bytes": size}
        for unit, size in zip(job.plan.units, job.unit_sizes(), strict=True)
    ]
