"""A request: what a caller of `quantize_and_export` asked for, checked before a weight is read.

A run and a dry run ask the same questions here, so that the second foretells the first.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from modelopt_lite.budgets import (
    SIZES,
    Budgets,
    Foretell,
    Schedule,
    Size,
    make_schedule,
    read_budgets,
)
from modelopt_lite.calibrate.data import (
    CalibData,
    CalibrationData,
    check_sizes,
    load_calibration_data,
)
from modelopt_lite.checkpoint.shards import ExportLayout
from modelopt_lite.checkpoint.writer import parse_size
from modelopt_lite.dialects.known import dialect_names
from modelopt_lite.errors import OutputError, RecipeError
from modelopt_lite.formats.base import Numerics
from modelopt_lite.job import Job, prepare
from modelopt_lite.offloading import OffloadChoice, apply_offload, check_offload
from modelopt_lite.output import (
    check_export_dir,
    check_free_space,
    default_export_dir,
    discard_unfinished,
    resolve_checkpoint,
    unfinished_bytes,
)
from modelopt_lite.pages.command import command_line
from modelopt_lite.paths import asked_path
from modelopt_lite.predict import Prediction, batch_shapes, planned_batches, predict
from modelopt_lite.progress import Progress
from modelopt_lite.recipes import Recipe, load_recipe
from modelopt_lite.report import REPORT_FILE, Report
from modelopt_lite.run import run_details
from modelopt_lite.sharding import degrees_for, shard
from modelopt_lite.verify.source import check_sidecars


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The keyword arguments of `quantize_and_export`, which describes each."""

    model_type: str | None = None
    export_dir: str | Path | None = None
    recipe: str | Path | Recipe = "nvfp4"
    kv_cache: str | None = None
    effective_bits: float | None = None
    search_dir: str | Path | None = None
    calib_data: CalibData = None
    calib_size: int = 512
    calib_seq_len: int = 512
    batch_size: int | None = None
    dialect: str | Sequence[str] = "modelopt"
    numerics: Numerics = "exact"
    offload: OffloadChoice = "auto"
    ep: int | None = None
    device: str | torch.device | None = None
    device_memory: Size | None = None
    host_memory: Size | None = None
    disk_scratch: Size | None = None
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

    def load_calibration_data(self, job: Job) -> CalibrationData:
        """Load what was asked for to run a model on.

        Raises:
            CalibrationError: Nothing to read, nothing in it, or ids outside of the vocabulary.
        """
        return load_calibration_data(
            self.calib_data,
            job.folder,
            size=self.calib_size,
            seq_len=self.calib_seq_len,
            batch_size=self.batch_size,
            vocab_size=job.vocab_size,
            trust_remote_code=self.trust_remote_code,
        )


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
        budgets: Bytes that the run may take, once `make_schedule` was called;
        schedule: and what it decided.
        notes: What of an offload configuration does not count, then.
        ckpt: The checkpoint, as it was given.
    """

    options: Options
    job: Job
    target: Path
    layout: ExportLayout
    data: CalibrationData | None = None
    differing: Sequence[str] = field(default_factory=tuple)
    budgets: Budgets = field(default_factory=Budgets)
    schedule: Schedule = field(default_factory=Schedule)
    notes: Sequence[str] = ()
    ckpt: str = ""
    _foretell: Foretell | None = None

    def load_data(self) -> None:
        """Load the calibration data, where the plan needs some.

        Raises:
            CalibrationError: Nothing to read, nothing in it, or ids outside of the vocabulary.
        """
        if self.job.plan.needs_calibration:
            self.data = self.options.load_calibration_data(self.job)

    @property
    def details(self) -> dict[str, Any]:
        """All that the bytes of the export depend on, the calibration data among it."""
        options = self.options
        asked = {
            "dialects": [plan.dialect.name for plan in self.job.plans.values()],
            "all_experts": options.moe_calibrate_all_experts,
            "seed": options.seed,
            "max_shard_size": parse_size(options.max_shard_size),
            "on_bad_shape": options.on_bad_shape,
        }
        return run_details(self.job, self.data, asked)

    @property
    def command(self) -> str:
        """What does the same on the command line, in the folder that a comment above it names."""
        given = {f.name: getattr(self.options, f.name) for f in fields(Options)}
        defaults = {f.name: f.default for f in fields(Options)}
        command = command_line(self.ckpt, {**given, "export_dir": str(self.target)}, defaults)
        paths = (Path(v) for v in (self.ckpt, *given.values()) if isinstance(v, str | Path))
        here = any(not path.is_absolute() and os.path.exists(path) for path in paths)  # noqa: PTH110  no path is too long for it
        return f"# in {Path.cwd()}\n{command}" if here else command

    @property
    def bytes_to_write(self) -> int:
        """Size of all files of the export but its configs, card and report."""
        return self.layout.total_bytes + len(self.job.plans) * self.job.sidecar_bytes()

    def make_schedule(self) -> None:
        """Decide what is in memory when, within the budgets.

        Raises:
            RecipeError: They cannot be met; ``schedule`` then is one unit at a time.
        """
        options, job = self.options, self.job
        batches = batch_shapes(self.data)
        if self.data is None and job.plan.needs_calibration:  # a dry run without data
            count, length = options.calib_size, options.calib_seq_len
            batches = planned_batches(count, length, options.batch_size or 8)
        self._foretell = partial(predict, job, self.layout, batches)
        stream = options.offload != "none"
        self.schedule = Schedule(units=job.unit_bytes()[0] if stream else None)
        offloading = apply_offload(job, options.offload)
        stream, self.notes = offloading.stream, offloading.notes
        given = {name: getattr(options, name) for name in SIZES}
        self.budgets = read_budgets(
            given, job.device, self.target, weights=offloading.weights, share=offloading.share
        )
        self.schedule = make_schedule(job, self.budgets, self._foretell, stream=stream)

    def prediction(self) -> Prediction:
        """Return what the run takes, by the schedule."""
        assert self._foretell is not None
        return self._foretell(budget=self.schedule.units, waiting=self.schedule.waiting)

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
        report.reused = True
        return report

    def reuse(self) -> Report | None:
        """Do as `finished`; what a run left that was killed when all was done goes."""
        report = self.finished()
        if report is not None:
            discard_unfinished(self.target)
        return report

    def checks(self) -> list[Callable[[], None]]:
        """Return what must pass before a run starts; each raises a `ModelOptLiteError`."""
        return [
            self._check_target,
            partial(check_free_space, self.target, self.bytes_to_write - self._bytes_written()),
            self.make_schedule,
        ]

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

    def _check_whole(self) -> None:
        """Refuse an export that was damaged: sizes of weight files, the others byte for byte."""
        target = self.target
        wrong = [
            str(path)
            for path, size in ((target / path, size) for path, size in self.layout.paths.items())
            if not path.is_file() or path.stat().st_size != size
        ]
        for part, plan in self.job.plans.items():
            configs = ("config.json", *plan.dialect.extra_files)
            paths = (target / part / name for name in configs)
            wrong += [str(path) for path in paths if not path.is_file()]
            wrong += [f.message for f in check_sidecars(target / part, self.job.folder)]
        if wrong:
            raise OutputError(
                f"the finished export {target} was changed since: {'; '.join(wrong[:5])} "
                f"({len(wrong)} in all); export again with overwrite=True (--overwrite)"
            )


def make_request(
    ckpt: str | Path, options: Options, *, world_size: int = 1, rank: int = 0
) -> Request:
    """Check the options and plan the run, or what one rank of several does of it.

    Raises:
        ModelOptLiteError: Anything that can be known without weights and calibration data.
    """
    recipe = load_recipe(options.recipe, kv_cache=options.kv_cache)
    if recipe.auto_quantize is not None:
        raise RecipeError(f"the formats of the recipe {recipe.name!r} are not chosen yet")
    _check_choices(options, world_size)
    folder = resolve_checkpoint(ckpt)
    target = default_export_dir(ckpt, recipe.name)
    if options.export_dir is not None:
        target = Path.cwd() / asked_path(options.export_dir, OutputError)
    shard_size = parse_size(options.max_shard_size)
    job = prepare(
        folder,
        recipe,
        model_type=options.model_type,
        numerics=options.numerics,
        on_bad_shape=options.on_bad_shape,
        trust_remote_code=options.trust_remote_code,
        device=options.device,
        dialects=dialect_names(options.dialect),
        sharded=world_size > 1 and options.ep != 1,
    )
    job.all_experts = options.moe_calibrate_all_experts
    degrees = degrees_for(job, world_size, options.ep)
    if world_size > 1:
        shard(job, degrees, rank)
    return Request(options, job, target, job.layout(shard_size), ckpt=str(ckpt))


def _check_choices(options: Options, world_size: int) -> None:
    dialect_names(options.dialect)
    check_offload(options.offload)
    check_sizes(options.calib_size, options.calib_seq_len, options.batch_size)
    if world_size < 1 or (options.ep is not None and options.ep < 1):
        raise RecipeError(
            f"world_size is {world_size} and ep is {options.ep}; give at least 1 process"
        )
    if not 0 <= options.seed < 1 << 64:
        raise RecipeError(f"seed is {options.seed}; give a number from 0 to 2**64 - 1")
