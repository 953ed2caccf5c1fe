"""The whole job: from a checkpoint to a quantized one that engines load."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import torch

from modelopt_lite.budgets import Size, make_outlook, read_budgets, unit_budget
from modelopt_lite.calibrate.data import CalibData, load_calibration_data
from modelopt_lite.checkpoint.shards import ShardLayout
from modelopt_lite.checkpoint.writer import parse_size
from modelopt_lite.errors import DegradedError, OutputError, RecipeError
from modelopt_lite.export.modelopt import QUANT_CONFIG_FILE
from modelopt_lite.formats.base import Numerics
from modelopt_lite.in_memory import export_hf, quantize
from modelopt_lite.job import prepare
from modelopt_lite.output import (
    check_export_dir,
    check_free_space,
    default_export_dir,
    resolve_checkpoint,
    staged,
)
from modelopt_lite.predict import batch_shapes, predict
from modelopt_lite.progress import Progress, make_progress
from modelopt_lite.recipes import Recipe, load_recipe
from modelopt_lite.report import REPORT_FILE, Report
from modelopt_lite.run import Run, run_details
from modelopt_lite.verify.source import check_sidecars

__all__ = ["export_hf", "quantize", "quantize_and_export"]

DIALECTS = ("modelopt",)
_CONFIGS = ("config.json", QUANT_CONFIG_FILE)


def quantize_and_export(
    ckpt: str | Path,
    model_type: str | None = None,
    *,
    export_dir: str | Path | None = None,
    recipe: str | Path | Recipe = "nvfp4",
    kv_cache: str | None = None,
    calib_data: CalibData = None,
    calib_size: int = 512,
    calib_seq_len: int = 512,
    batch_size: int | None = None,
    dialect: str = "modelopt",
    numerics: Numerics = "exact",
    offload: Literal["auto", "none"] = "auto",
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
        recipe: Name of a preset, path of a YAML file, or a `Recipe`.
        kv_cache: "fp8" adds scales for an FP8 key and value cache; "none" removes the recipe's.
        calib_data: None for the text that comes with CPython; a path (.txt, .jsonl, .json,
            .parquet, or .safetensors of token ids); texts; or LongTensor batches [B, T], which are
            used as they are, in order, without a mask.
        calib_size: The most sequences that are taken from text.
        calib_seq_len: Their length in tokens.
        batch_size: Sequences a batch; default 8.
        dialect: Names and config files of the export: "modelopt".
        numerics: "exact"; or "modelopt" for the bytes of NVIDIA Model Optimizer 0.47.
        offload: "auto" brings decoder layers in one at a time; "none" holds the whole model.
        device: Where the model runs; default the accelerator if there is one, else the CPU.
        device_memory: The most memory of weights, activations and results on the device: "80GB",
            bytes, or a fraction of what there is ("50%", 0.5); default the variable
            FT_DEVICE_MEMORY, else no limit. A run that cannot keep to it is refused; one with
            memory to spare reads further ahead.
        host_memory: The same for the resident memory of the process; or FT_HOST_MEMORY.
        disk_scratch: The same for temporary files; or FT_DISK_SCRATCH. Waiting activations stay
            in memory, so none are needed.
        moe_calibrate_all_experts: Every expert sees every token.
        on_bad_shape: "skip" leaves matrices that the format cannot hold; "error" refuses them.
        strict: Raise `DegradedError`, after the export, where the run had to fall back.
        resume: Where ``export_dir`` holds the finished export of the same inputs, return its
            report at once, after a look at the sizes of its files.
        overwrite: Replace a folder that is not empty.
        max_shard_size: Largest weight file; only a single tensor may exceed it.
        trust_remote_code: Allow code that the checkpoint brings.
        seed: For model code that draws random numbers.
        verify: Audit the export, and compare each packed matrix with its source.
        progress: False for none; a function ``(phase, done, total)`` to follow it.

    Returns:
        What was done; also written into the export as ``modelopt_lite_report.json``.

    Raises:
        ModelOptLiteError: What is wrong, the value, and what to do. Nothing is left behind.
    """
    chosen = load_recipe(recipe, kv_cache=kv_cache)
    _check_choices(dialect, offload, seed)
    folder = resolve_checkpoint(ckpt)
    target = default_export_dir(ckpt, chosen.name)
    if export_dir is not None:
        target = Path(export_dir).expanduser()
    shard_size = parse_size(max_shard_size)
    job = prepare(
        folder,
        chosen,
        model_type=model_type,
        numerics=numerics,
        on_bad_shape=on_bad_shape,
        trust_remote_code=trust_remote_code,
        device=device,
    )
    data = None
    if job.plan.needs_calibration:
        data = load_calibration_data(
            calib_data,
            folder,
            size=calib_size,
            seq_len=calib_seq_len,
            batch_size=batch_size,
            vocab_size=job.vocab_size,
            trust_remote_code=trust_remote_code,
        )
    options = {
        "dialect": dialect,
        "all_experts": moe_calibrate_all_experts,
        "seed": seed,
        "max_shard_size": shard_size,
        "on_bad_shape": on_bad_shape,
    }
    details = run_details(job, data, options)
    layout = job.layout(shard_size)
    if resume and not overwrite and (done := _finished(target, details)) is not None:
        _check_whole(target, layout, folder)
        return done
    check_export_dir(target, folder, overwrite=overwrite)
    check_free_space(target, layout.total_bytes + job.sidecar_bytes())
    sizes = {"host_memory": host_memory, "device_memory": device_memory}
    budgets = read_budgets({**sizes, "disk_scratch": disk_scratch}, job.device, target)
    shapes, stream = batch_shapes(data), offload != "none"
    least = predict(job, layout, shapes, stream=stream, all_experts=moe_calibrate_all_experts)
    budget, predicted = unit_budget(job, budgets, least, stream=stream)
    report = Report(str(target), chosen.name, job.model_type, details=details)
    report.predicted_memory_bytes = predicted.host_peak
    outlook = make_outlook(job, predicted, budgets, shapes)
    with torch.random.fork_rng(devices=[]), make_progress(progress, outlook) as tell:
        torch.manual_seed(seed)
        with staged(target, overwrite=overwrite) as work:
            run = Run(job, data, report, verify, tell)
            run.weights(work, layout, budget, moe_calibrate_all_experts)
            run.finish(work)
    if strict:
        _refuse_degraded(report)
    return report


def _check_choices(dialect: str, offload: str, seed: int) -> None:
    if dialect not in DIALECTS:
        raise RecipeError(f"unknown dialect {dialect!r}; known: {', '.join(DIALECTS)}")
    if offload not in ("auto", "none"):
        raise RecipeError(f'offload must be "auto" or "none", got {offload!r}')
    if not 0 <= seed < 1 << 64:
        raise RecipeError(f"seed is {seed}; give a number from 0 to 2**64 - 1")


def _finished(target: Path, details: dict[str, Any]) -> Report | None:
    """Return the report of an earlier run with exactly these inputs, if its export is there."""
    path = target / REPORT_FILE
    if not path.is_file():
        return None
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        data.pop("bits_per_weight", None)
        report = Report(**data)
    except (ValueError, TypeError) as error:
        raise OutputError(
            f"{path} is no report of this program ({error}); remove the folder or use "
            "overwrite=True (--overwrite)"
        ) from error
    same = json.loads(json.dumps(details)) == report.details
    return report if same else None


def _check_whole(target: Path, layout: ShardLayout, source: Path) -> None:
    """Refuse a finished export that was damaged since: sizes of weight files, other files whole."""
    wrong = [
        str(path)
        for path, size in ((target / file.name, file.size) for file in layout.files)
        if not path.is_file() or path.stat().st_size != size
    ]
    wrong += [str(target / n) for n in _CONFIGS if not (target / n).is_file()]
    wrong += [finding.message for finding in check_sidecars(target, source)]
    if wrong:
        raise OutputError(
            f"the finished export {target} was changed since: {'; '.join(wrong[:5])} "
            f"({len(wrong)} in all); export again with overwrite=True (--overwrite)"
        )


def _refuse_degraded(report: Report) -> None:
    if report.degraded:
        raise DegradedError(
            f"the export {report.export_dir} is complete, but the run had to fall back: "
            f"{_degradations(report)}; see {Path(report.export_dir) / REPORT_FILE}",
            report,
        )


def _degradations(report: Report) -> str:
    parts = list(report.fallbacks)
    if report.cold_experts:
        parts.append(f"{len(report.cold_experts)} experts saw no calibration token")
    if report.beyond_bound:
        parts.append(f"{len(report.beyond_bound)} matrices exceed their format's error bound")
    return "; ".join(parts)
