"""The whole job: from a checkpoint to a quantized one that engines load."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Literal

import torch

from modelopt_lite.auto.settle import Settled, settle
from modelopt_lite.budgets import Size, make_outlook
from modelopt_lite.calibrate.data import CalibData
from modelopt_lite.checkpoint.journal import difference
from modelopt_lite.errors import DegradedError, RecipeError
from modelopt_lite.formats.base import Numerics
from modelopt_lite.in_memory import export_hf, quantize
from modelopt_lite.offloading import OffloadChoice
from modelopt_lite.output import staged, staged_export
from modelopt_lite.parallel.team import Team, team_of_run
from modelopt_lite.predict import Prediction
from modelopt_lite.preview import dry_run
from modelopt_lite.process import collector_paused, exit_at_once, only_new_collected
from modelopt_lite.progress import Progress, make_progress
from modelopt_lite.recipes import Recipe, load_recipe
from modelopt_lite.report import REPORT_FILE, Report
from modelopt_lite.request import Options, Request, make_request
from modelopt_lite.run import Run
from modelopt_lite.timeline import Timeline
from modelopt_lite.words import counted

__all__ = ["dry_run", "export_hf", "quantize", "quantize_and_export"]


def quantize_and_export(
    ckpt: str | Path,
    model_type: str | None = None,
    *,
    export_dir: str | Path | None = None,
    recipe: str | Path | Recipe = "nvfp4",
    kv_cache: str | None = None,
    effective_bits: float | None = None,
    search_dir: str | Path | None = None,
    calib_data: CalibData = None,
    calib_size: int = 512,
    calib_seq_len: int = 512,
    batch_size: int | None = None,
    dialect: str | Sequence[str] = "modelopt",
    numerics: Numerics = "exact",
    offload: OffloadChoice = "auto",
    ep: int | None = None,
    device: str | torch.device | None = None,
    device_memory: Size | None = None,
    host_memory: Size | None = None,
    disk_scratch: Size | None = None,
    moe_calibrate_all_experts: bool = False,
    on_bad_shape: Literal["error", "skip"] = "error",
    strict: bool = False,
    resume: bool = True,
    overwrite: bool = False,
    max_shard_size: str | int = "10GB",
    trust_remote_code: bool = False,
    seed: int = 0,
    verify: bool = True,
    progress: bool | Progress = True,
) -> Report:
    """Quantize a checkpoint and write one that vLLM, SGLang and TensorRT-LLM load.

    Args:
        ckpt: Folder of a Hugging Face checkpoint, or a hub id.
        model_type: Must equal that of config.json, where given.
        export_dir: Where to write; default ``./<checkpoint name>-<recipe>``.
        recipe: Name of a preset, path of a YAML file, or a `Recipe`. One with ``auto_quantize``
            has its formats searched first.
        kv_cache: "fp8" adds scales for an FP8 key and value cache; "none" removes the recipe's.
        effective_bits: The most bits a weight that a search may spend, in place of the recipe's.
        search_dir: Where a search keeps its scores, which another one goes on with, and writes the
            recipe that it chose; default ``export_dir`` with ``-search`` behind its name.
        calib_data: None for the text that comes with CPython; a path (.txt, .jsonl, .json,
            .parquet, or .safetensors of token ids); texts; or LongTensor batches [B, T], which are
            used as they are, in order, without a mask. Records may be chats, with pictures
            (docs/calibration.md).
        calib_size: The most sequences that are taken from text.
        calib_seq_len: Their length in tokens.
        batch_size: Sequences a batch; default 8.
        dialect: Names, shapes and config files of the export: "modelopt"; "compressed-tensors";
            or several or "both" of one run, each in a folder of its name below ``export_dir``.
        numerics: "exact"; or "modelopt" for the bytes of NVIDIA Model Optimizer 0.47.
        offload: "auto" brings decoder layers in one at a time; "none" holds the whole model. An
            `OffloadConfig`, or the `OffloadPlan` of `plan_offload`, says which parameters come
            and go, and how many bytes of weights there may be (docs/offload.md).
        ep: Of several processes (torchrun), how many share the experts of a layer; default the
            largest number that divides both theirs and that of the experts.
        device: Where the model runs; default the accelerator if there is one, else the CPU.
        device_memory: The most memory of weights, activations and results on the device: "80GB",
            bytes, or a fraction of what there is ("50%", 0.5); default the variable
            FT_DEVICE_MEMORY, else no limit. A run that cannot keep to it is refused; one with
            memory to spare reads further ahead.
        host_memory: The same for the resident memory of the process; or FT_HOST_MEMORY. Where
            need be, waiting activations go to disk, and experts come in a few at a time.
        disk_scratch: The same for temporary files, which lie beside the export; or
            FT_DISK_SCRATCH.
        moe_calibrate_all_experts: Every expert sees every token.
        on_bad_shape: "skip" leaves matrices that the format cannot hold; "error" refuses them.
        strict: Raise `DegradedError`, after the export, where the run had to fall back.
        resume: Go on where an interrupted run with the same inputs ended; where ``export_dir``
            holds its finished export, return its report at once (its ``reused`` is true), after a
            look at the sizes of its files. False starts anew.
        overwrite: Replace a folder that is not empty; a finished export is made again.
        max_shard_size: Largest weight file; only a single tensor may exceed it.
        trust_remote_code: Allow code that the checkpoint brings.
        seed: For model code that draws random numbers.
        verify: Audit the export, and compare each packed matrix with its source.
        progress: False for none; a function ``(phase, done, total)`` to follow it.

    Returns:
        What was done; also written into the export as ``modelopt_lite_report.json``, and for
        people as ``report.html`` and, as far as it is of interest to others, ``README.md``.

    Raises:
        ModelOptLiteError: What is wrong, the value, and what to do. Nothing is left behind but
            what the same run would go on from, which the message names.
    """
    options = Options(
        model_type=model_type,
        export_dir=export_dir,
        recipe=recipe,
        kv_cache=kv_cache,
        effective_bits=effective_bits,
        search_dir=search_dir,
        calib_data=calib_data,
        calib_size=calib_size,
        calib_seq_len=calib_seq_len,
        batch_size=batch_size,
        dialect=dialect,
        numerics=numerics,
        offload=offload,
        ep=ep,
        device=device,
        device_memory=device_memory,
        host_memory=host_memory,
        disk_scratch=disk_scratch,
        moe_calibrate_all_experts=moe_calibrate_all_experts,
        on_bad_shape=on_bad_shape,
        strict=strict,
        resume=resume,
        overwrite=overwrite,
        max_shard_size=max_shard_size,
        trust_remote_code=trust_remote_code,
        seed=seed,
        verify=verify,
        progress=progress,
    )
    exit_at_once()
    with team_of_run() as team, only_new_collected():
        if team is None:
            settled = settle(ckpt, options)
            with _scores_told(settled):
                report = _run(settled, ckpt)
        else:
            report = _run_rank(ckpt, options, team)
    if strict and report.degraded:
        raise DegradedError(
            f"the export {report.export_dir} is complete, but the run had to fall back: "
            f"{_degradations(report)}; see {Path(report.export_dir) / REPORT_FILE}",
            report,
        )
    return report


@contextmanager
def _scores_told(settled: Settled) -> Iterator[None]:
    """Have an interruption of the run behind a search say that its scores stay."""
    try:
        yield
    except KeyboardInterrupt as error:
        if settled.folder is not None:
            said = str(error) or "interrupted; run the same again"
            error.args = (f"{said}; the formats that were chosen stay in {settled.folder}",)
        raise


def _run(settled: Settled, ckpt: str | Path) -> Report:
    with collector_paused(stays=True):
        request = make_request(ckpt, settled.options)
        request.job.plan.notes.extend(settled.notes)
        request.load_data()
        report = request.reuse()
        if report is None:
            for check in request.checks():
                check()
    return report or _write(request, searched=settled.seconds)


def _run_rank(ckpt: str | Path, options: Options, team: Team) -> Report:
    """Do one rank's part of a run; every rank returns the report."""
    settled = _settle_once(ckpt, options, team)
    request = make_request(ckpt, settled.options, world_size=team.world_size, rank=team.rank)
    request.job.plan.notes.extend(settled.notes)
    request.load_data()
    _check_alike(request, team)
    report = team.decide("look for an export", request.reuse)
    if report is not None:
        return report
    if team.is_first:
        for check in request.checks():
            check()
    else:
        request.make_schedule()
    team.barrier("checks")
    if not team.is_first:
        _follow(request, team)
    return team.decide("report", partial(_write, request, team, searched=settled.seconds))


def _settle_once(ckpt: str | Path, options: Options, team: Team) -> Settled:
    """Have rank 0 search for formats, where they are not settled, while the others wait."""
    if load_recipe(options.recipe).auto_quantize is None:
        return settle(ckpt, options)

    def search() -> tuple[Recipe, tuple[str, ...], float]:
        found = settle(ckpt, options)
        return load_recipe(found.options.recipe), found.notes, found.seconds

    recipe, notes, seconds = team.decide("choose formats", search)
    return Settled(
        replace(options, recipe=recipe, kv_cache=None, effective_bits=None), notes, seconds
    )


def _check_alike(request: Request, team: Team) -> None:
    """Refuse ranks whose inputs differ: their parts would not fit together."""
    details = team.everyone("inputs", json.loads(json.dumps(request.details)))
    for rank, other in enumerate(details):
        if other != details[0]:
            raise RecipeError(
                f"rank {rank} runs with other inputs than rank 0: "
                f"{difference(details[0], other)}; start all with the same command and versions"
            )


def _write(request: Request, team: Team | None = None, *, searched: float = 0.0) -> Report:
    """Make the export and put it into its place."""
    options, target, job = request.options, request.target, request.job
    predicted = request.prediction()
    report = _begun(request, predicted)
    if searched:
        report.seconds["choose formats"] = searched
    outlook = make_outlook(job, predicted, request.budgets, request.data)
    with torch.random.fork_rng(devices=[]), make_progress(options.progress, outlook) as tell:
        torch.manual_seed(options.seed)
        with staged(target, overwrite=options.overwrite, resume=options.resume) as work:
            timeline = Timeline(outlook.device_used)
            run = Run(job, request.data, report, options.verify, tell, team, timeline)
            run.weights(work, request.layout, request.schedule)
            run.finish(work)
    return report


def _follow(request: Request, team: Team) -> None:
    """Write what is this rank's into the export that rank 0 makes."""
    options = request.options
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(options.seed)
        report = _begun(request, request.prediction())
        run = Run(request.job, request.data, report, options.verify, _quiet, team)
        run.weights(staged_export(request.target), request.layout, request.schedule)
        request.job.source.close()


def _quiet(phase: str, done: int, total: int) -> None:
    """Rank 0 tells how far the run is."""


def _begun(request: Request, predicted: Prediction) -> Report:
    job = request.job
    recipe = job.plan.recipe.name
    report = Report(str(request.target), recipe, job.model_type, details=request.details)
    report.notes += request.notes
    report.predicted_memory_bytes = predicted.host_peak
    report.command = request.command
    if request.data is not None:
        report.calibrated_with = _calibrated_with(request)
    report.budgets = {
        f"{tier} memory" if tier != "disk" else "disk scratch": size
        for tier, size in asdict(request.budgets).items()
        if size is not None and tier != "weights"
    }
    return report


def _calibrated_with(request: Request) -> dict[str, str | int | None]:
    options = request.options
    data = options.calib_data
    if data is not None and not isinstance(data, str | Path):
        return {"calib_data": "calibration.safetensors"}
    return {
        "calib_data": None if data is None else Path(data).name,
        "calib_size": options.calib_size,
        "calib_seq_len": options.calib_seq_len,
        "batch_size": options.batch_size,
    }


def _degradations(report: Report) -> str:
    parts = list(report.fallbacks)
    if report.cold_experts:
        parts.append(
            f"{counted(len(report.cold_experts), 'expert')} saw no calibration token (give more "
            "data, or moe_calibrate_all_experts=True)"
        )
    if report.beyond_bound:
        count = counted(len(report.beyond_bound), "matrix", "matrices")
        parts.append(f"{count} beyond the format's error bound")
    return "; ".join(parts)
