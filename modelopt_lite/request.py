"""A request: what a caller of `quantize_and_export` asked for, checked before a weight is read.

A run and a dry run ask the same questions here, so that the second foretells the first.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from modelopt_lite.calibrate.data import CalibData, CalibrationData, load_calibration_data
from modelopt_lite.checkpoint.shards import ShardLayout
from modelopt_lite.checkpoint.writer import parse_size
from modelopt_lite.errors import OutputError, RecipeError
from modelopt_lite.export.modelopt import QUANT_CONFIG_FILE
from modelopt_lite.formats.base import Numerics
from modelopt_lite.job import Job, prepare
from modelopt_lite.output import (
    check_export_dir,
    check_free_space,
    default_export_dir,
    discard_unfinished,
    resolve_checkpoint,
    unfinished_bytes,
)
from modelopt_lite.progress import Progress
from modelopt_lite.recipes import Recipe, load_recipe
from modelopt_lite.report import REPORT_FILE, Report
from modelopt_lite.run import run_details
from modelopt_lite.verify.source import check_sidecars

DIALECTS = ("modelopt",)
_CONFIGS = ("config.json", QUANT_CONFIG_FILE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The keyword arguments of `quantize_and_export`, which describes each."""

    model_type: str | None = None
    export_dir: str | Path | None = None
    recipe: str | Path | Recipe = "nvfp4"
    kv_cache: str | None = None
    calib_data: CalibData = None
    calib_size: int = 512
    calib_seq_len: int = 512
    batch_size: int | None = None
    dialect: str = "modelopt"
    numerics: Numerics = "exact"
    offload: Literal["auto", "none"] = "auto"
    device: str | torch.device | None = None
    device_memory: str | int | None = None
    host_memory: str | int | None = None
    disk_scratch: str | int | None = None
    moe_calibrate_all_experts: bool = False
    on_bad_shape: Literal["error", "skip"] = "error"
    strict: bool = False
    resume: bool = True
    overwrite: bool = False
    max_shard_size: str | int = "10GB"
    trust_remote_code: bool = False
    seed: int = 0
    verify: bool = True
    progress: bool | Progress = True


@dataclass(slots=True)
class Request:
    """A prepared job, where its export goes, and what the caller allows.

    Attributes:
        options: What was asked for.
        job: The source, its model without weights, and the plan.
        target: Folder of the export.
        layout: Where every byte of its weights will lie.
        data: What to calibrate with, once `load_data` was called; None where nothing is needed.
        differing: The parts of ``details`` that an export in ``target`` does not share, once
            `finished` was called.
    """

    options: Options
    job: Job
    target: Path
    layout: ShardLayout
    data: CalibrationData | None = None
    differing: Sequence[str] = field(default_factory=tuple)

    def load_data(self) -> None:
        """Load the calibration data, where the plan needs some.

        Raises:
            CalibrationError: Nothing to read, nothing in it, or ids outside of the vocabulary.
        """
        options = self.options
        if self.job.plan.needs_calibration:
            self.data = load_calibration_data(
                options.calib_data,
                self.job.folder,
                size=options.calib_size,
                seq_len=options.calib_seq_len,
                batch_size=options.batch_size,
                vocab_size=self.job.vocab_size,
                trust_remote_code=options.trust_remote_code,
            )

    @property
    def details(self) -> dict[str, Any]:
        """All that the bytes of the export depend on, the calibration data among it."""
        options = self.options
        asked = {
            "dialect": options.dialect,
            "all_experts": options.moe_calibrate_all_experts,
            "seed": options.seed,
            "max_shard_size": parse_size(options.max_shard_size),
            "on_bad_shape": options.on_bad_shape,
        }
        return run_details(self.job, self.data, asked)

    @property
    def bytes_to_write(self) -> int:
        """Size of all files of the export but its configs and report."""
        return self.layout.total_bytes + self.job.sidecar_bytes()

    def memory_estimate(self) -> int:
        """Bytes of memory that the run needs; without data yet, for the most that it may take."""
        if not self.job.plan.needs_calibration:
            return self.job.memory_estimate(0)
        most = self.options.calib_size * self.options.calib_seq_len
        return self.job.memory_estimate(self.data.tokens if self.data else most)

    def finished(self) -> Report | None:
        """Return the report of an earlier run with exactly these inputs, if its export is there.

        Raises:
            OutputError: The report is none, or files of the export changed since.
        """
        path = self.target / REPORT_FILE
        if not self.options.resume or self.options.overwrite or not path.is_file():
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
        wanted = json.loads(json.dumps(self.details))
        keys = dict.fromkeys((*wanted, *report.details))
        self.differing = [k for k in keys if wanted.get(k) != report.details.get(k)]
        if self.differing:
            return None
        self._check_whole()
        discard_unfinished(self.target)  # of a run that was killed when all was done
        report.reused = True
        return report

    def checks(self) -> list[Callable[[], None]]:
        """Return what must pass before a run starts; each raises a `ModelOptLiteError`."""
        return [
            self._check_target,
            partial(check_free_space, self.target, self.bytes_to_write - self._bytes_written()),
            self._check_budgets,
        ]

    def unit_budget(self) -> int | None:
        """Return how many bytes of units may be in memory; None: all of them, or tensor by tensor.

        Two layers, one in use and one read ahead; what ``host_memory`` leaves beyond the least that
        the run needs is for reading further ahead.
        """
        if self.options.offload == "none" or self.job.plan.by_tensor:
            return None
        one, two = self.job.unit_bytes()
        if self.options.host_memory is None:
            return two
        return one + parse_size(self.options.host_memory) - self.memory_estimate()

    def _bytes_written(self) -> int:
        """Bytes that an interrupted run left, which the run would go on with."""
        return unfinished_bytes(self.target) if self.options.resume else 0

    def _check_target(self) -> None:
        try:
            check_export_dir(self.target, self.job.folder, overwrite=self.options.overwrite)
        except OutputError as error:
            if not self.differing:
                raise
            raise OutputError(
                f"{error} (it holds an export that cannot be reused: it differs in "
                f"{', '.join(self.differing)})"
            ) from error

    def _check_budgets(self) -> None:
        """Refuse a budget below the estimate; on a CPU the device's memory is the host's."""
        need = self.memory_estimate()
        for name in ("device_memory", "host_memory"):
            budget = getattr(self.options, name)
            if budget is not None and (have := parse_size(budget)) < need:
                raise RecipeError(
                    f"{name} {budget!r} is {have:,} bytes, and the run needs about {need:,}; give "
                    "at least that, or fewer calibration tokens (calib_size, calib_seq_len)"
                )

    def _check_whole(self) -> None:
        """Refuse an export that was damaged: sizes of weight files, the others byte for byte."""
        target = self.target
        wrong = [
            str(path)
            for path, size in ((target / file.name, file.size) for file in self.layout.files)
            if not path.is_file() or path.stat().st_size != size
        ]
        wrong += [str(target / n) for n in _CONFIGS if not (target / n).is_file()]
        wrong += [finding.message for finding in check_sidecars(target, self.job.folder)]
        if wrong:
            raise OutputError(
                f"the finished export {target} was changed since: {'; '.join(wrong[:5])} "
                f"({len(wrong)} in all); export again with overwrite=True (--overwrite)"
            )


def make_request(ckpt: str | Path, options: Options) -> Request:
    """Check the options and plan the run.

    Raises:
        ModelOptLiteError: Anything that can be known without weights and calibration data.
    """
    recipe = load_recipe(options.recipe, kv_cache=options.kv_cache)
    _check_choices(options)
    folder = resolve_checkpoint(ckpt)
    target = default_export_dir(ckpt, recipe.name)
    if options.export_dir is not None:
        target = Path(options.export_dir).expanduser()
    shard_size = parse_size(options.max_shard_size)
    job = prepare(
        folder,
        recipe,
        model_type=options.model_type,
        numerics=options.numerics,
        on_bad_shape=options.on_bad_shape,
        trust_remote_code=options.trust_remote_code,
        device=options.device,
    )
    return Request(options, job, target, job.layout(shard_size))


def _check_choices(options: Options) -> None:
    if options.dialect not in DIALECTS:
        raise RecipeError(f"unknown dialect {options.dialect!r}; known: {', '.join(DIALECTS)}")
    if options.offload not in ("auto", "none"):
        raise RecipeError(f'offload must be "auto" or "none", got {options.offload!r}')
    for size in (options.disk_scratch, options.device_memory, options.host_memory):
        if size is not None:
            parse_size(size)
    if not 0 <= options.seed < 1 << 64:
        raise RecipeError(f"seed is {options.seed}; give a number from 0 to 2**64 - 1")
