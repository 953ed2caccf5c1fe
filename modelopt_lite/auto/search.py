"""A search for formats: what it needs, what it found before, and the recipe that comes of it."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from modelopt_lite.auto.choose import choose
from modelopt_lite.auto.gradient import gradient_scores
from modelopt_lite.auto.kl import kl_scores
from modelopt_lite.auto.outlook import (
    READS,
    SearchSchedule,
    make_search_schedule,
    predict_search,
)
from modelopt_lite.auto.resume import SearchLog
from modelopt_lite.auto.space import Group, Scores, Space
from modelopt_lite.auto.variant_log import VariantLog
from modelopt_lite.budgets import SIZES, read_budgets
from modelopt_lite.build import eager_experts
from modelopt_lite.calibrate.data import CalibrationData
from modelopt_lite.checkpoint.journal import has_entries
from modelopt_lite.errors import CalibrationError, OutputError, RecipeError
from modelopt_lite.job import (
    Job,
    versions,
)
from modelopt_lite.locks import OWNER, held
from modelopt_lite.offload.memory import bound_caches
from modelopt_lite.output import may_go_on, tell_kept
from modelopt_lite.predict import Batch, planned_batches
from modelopt_lite.progress import Outlook, Progress, make_progress
from modelopt_lite.recipes import Recipe
from modelopt_lite.recipes.auto import AutoQuantize
from modelopt_lite.recipes.written import write_recipe
from modelopt_lite.report import write_whole
from modelopt_lite.request import Options

_LOGITS = 1 << 26  # elements of a batch
_VERSION = 1


@dataclass(slots=True)
class Search:
    """A prepared search.

    Attributes:
        options: What the run was asked for.
        recipe: The recipe;
        auto: and what it chooses from.
        job: The source and its model, without weights.
        space: What is searched.
        folder: Where scores and recipes are written.
        data: What to run the model on, once `load_data` was called.
    """

    options: Options
    recipe: Recipe
    auto: AutoQuantize
    job: Job
    space: Space
    folder: Path
    data: CalibrationData | None = None
    batches: list[Tensor] = field(default_factory=list)

    @property
    def limit(self) -> int:
        """Bytes that groups with a choice may take.

        Raises:
            RecipeError: No choice keeps to so few bits.
        """
        auto, space = self.auto, self.space
        settled = sum(min(group.bytes.values()) for group in space.settled)
        limit = int(auto.effective_bits * space.weights / 8) - settled
        least = sum(min(group.bytes.values()) for group in space.groups)
        if least > limit:
            bits = -(-8000 * (least + settled) // space.weights) / 1000
            raise RecipeError(
                f"effective_bits is {auto.effective_bits:g}, and the fewest that "
                f"{', '.join(auto.formats)} can reach on this model is {bits:.3f}; ask for that, "
                "or add a smaller format"
            )
        return limit

    def load_data(self) -> None:
        """Load the calibration data.

        Raises:
            CalibrationError: Nothing to read, nothing in it, or ids outside of the vocabulary; or
                samples with pictures.
        """
        self.data = self.options.load_calibration_data(self.job)
        if self.data.others:
            raise CalibrationError(
                f"auto_quantize scores formats on text, and {self.data.origin} has samples with "
                "pictures; search on text, then run the recipe that is written with them"
            )
        self.batches = fitting_batches(self.data.batches, self.job.vocab_size)

    def shapes(self) -> list[Batch]:
        """Return the batches' shapes; of a dry run without data those that it would have."""
        if self.data is not None:
            return [(len(batch), batch.shape[1]) for batch in self.batches]
        options = self.options
        fitting = max(1, _LOGITS // (self.job.vocab_size * options.calib_seq_len))
        size = min(options.batch_size or 8, fitting)
        return planned_batches(options.calib_size, options.calib_seq_len, size)

    def schedule(self) -> SearchSchedule:
        """Decide what is in memory when.

        Raises:
            RecipeError: The budgets cannot be met.
        """
        given = {name: getattr(self.options, name) for name in SIZES}
        budgets = read_budgets(given, self.job.device, self.folder)
        stream = self.options.offload != "none"
        return make_search_schedule(
            self.job,
            self.space,
            self.shapes(),
            budgets,
            stream=stream,
            notes=self._notes_variants,
        )

    @property
    def inputs(self) -> dict[str, Any]:
        """All that scores depend on; the bits to spend are not among it."""
        recipe, data = self.recipe, self.data
        assert data is not None
        return {
            "source_fingerprint": self.job.source.fingerprint(),
            "formats": sorted(self.space.plans),
            "method": self.auto.method,
            "include": list(recipe.include),
            "exclude": list(recipe.exclude),
            "calibration": {
                "samples": data.samples,
                "tokens": data.tokens,
                "sha256": data.fingerprint(),
            },
            "seed": self.options.seed,
            "versions": {**versions(self.job), "threads": str(torch.get_num_threads())},
        }

    @property
    def scores_file(self) -> Path:
        """Where the scores are, or will be; the name depends on ``inputs``."""
        digest = hashlib.sha256(json.dumps(self.inputs, sort_keys=True).encode()).hexdigest()
        return self.folder / f"scores-{self.auto.method}-{digest[:12]}.json"

    @property
    def _journal(self) -> Path:
        return self.scores_file.with_suffix(".journal")

    def saved(self) -> Scores | None:
        """Return the scores that an earlier search with the same inputs wrote.

        Raises:
            OutputError: The file is damaged.
        """
        path = self.scores_file
        if not path.is_file():
            return None
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            scores = {g["name"]: g["scores"] for g in found["groups"]}
            wanted = {g.name: set(g.bytes) & set(self.space.plans) for g in self.space.groups}
            if {name: set(own) for name, own in scores.items()} != wanted:
                raise ValueError("it lacks groups or formats")
        except (ValueError, KeyError, TypeError) as error:
            raise OutputError(
                f"{path} holds no scores of this search ({error}); remove it to search again"
            ) from error
        return scores

    def run(self) -> Scores:
        """Score all formats of all groups, and write the scores.

        Raises:
            OutputError: Another process searches in the same folder, or it cannot be written.
        """
        doing = "searches for formats in the search_dir of this one"
        with held(self.folder, doing, "(--search-dir)"):
            try:
                return self.saved() or self._run()
            except BaseException as error:
                self._tidy(error)
                raise

    def _tidy(self, error: BaseException) -> None:
        """After a search that ended early: say what of it stays, or leave nothing behind."""
        if has_entries(self.folder, self._journal.name):
            if may_go_on(error):
                tell_kept(error, self.folder)
            return
        shutil.rmtree(self._journal, ignore_errors=True)
        if all(path.name == OWNER for path in self.folder.glob("*")):
            shutil.rmtree(self.folder, ignore_errors=True)

    def _run(self) -> Scores:
        schedule = self.schedule()
        bound_caches()
        foretold = predict_search(self.job, self.space, self.shapes(), schedule)
        assert self.data is not None
        outlook = Outlook(
            tokens=self.data.tokens,
            bytes_to_read=foretold.bytes_read,
            host_budget=foretold.host_peak,
            device_budget=foretold.device_peak,
        )
        job = self.job
        with (
            torch.random.fork_rng(devices=[]),
            eager_experts(job.model),
            make_progress(self.options.progress, outlook) as tell,
        ):
            torch.manual_seed(self.options.seed)
            scores = self._scored(schedule, tell)
        self._write(scores)
        shutil.rmtree(self._journal, ignore_errors=True)
        return scores

    def _scored(self, schedule: SearchSchedule, tell: Progress) -> Scores:
        """Score by the recipe's method; a search goes on where one was killed."""
        arguments: dict[str, Any] = {
            "schedule": schedule,
            "scratch": self.folder,
            "progress": tell,
        }
        batches = [batch.to(self.job.device) for batch in self.batches]
        if not self.options.resume:
            shutil.rmtree(self._journal, ignore_errors=True)
        if self.auto.method == "kl":
            noted = None
            if self._notes_variants:
                noted = VariantLog(self._journal, self.inputs, len(batches), self.job.device)
            return kl_scores(self.job, self.space, batches, log=noted, **arguments)
        log = SearchLog(self._journal, self.inputs)
        return gradient_scores(self.job, self.space, batches, log=log, **arguments)

    @property
    def _notes_variants(self) -> bool:
        """Whether a search by divergence writes down what all variants have become."""
        return self.options.resume and self.auto.method == "kl"

    def formats(self, scores: Scores) -> dict[str, str]:
        """Return the format of each group: the least summed score within the bits.

        Raises:
            RecipeError: No choice keeps to so few bits.
        """
        groups = {group.name: group.options(scores[group.name]) for group in self.space.groups}
        return choose(groups, self.limit)

    def chosen(self, scores: Scores) -> tuple[Recipe, str]:
        """Return the recipe with the least summed score within the bits, and what to say of it."""
        space, auto = self.space, self.auto
        formats = self.formats(scores)
        total = sum(scores[name].get(fmt, 0.0) for name, fmt in formats.items())
        said = (
            f"formats chosen by AutoQuantize ({auto.method}): {space.bits(formats):.3f} effective "
            f"bits a weight of at most {auto.effective_bits:g}, summed score {total:.6g}"
        )
        return space.recipe_for(formats, self.recipe.name, said), said

    def stand_in(self) -> Recipe:
        """Return a recipe of as many bits, chosen by sizes alone."""
        formats = self.formats({group.name: _errors_by_size(group) for group in self.space.groups})
        said = "a stand-in: formats by the sizes of matrices alone, before any search"
        return self.space.recipe_for(formats, self.recipe.name, said)

    def describe(self) -> dict[str, Any]:
        """Return, as JSON values, what a search would do."""
        auto, schedule = self.auto, self.schedule()
        foretold = predict_search(self.job, self.space, self.shapes(), schedule)
        return {
            "method": auto.method,
            "effective_bits": auto.effective_bits,
            "formats": list(auto.formats),
            "groups": len(self.space.groups),
            "weights": self.space.weights,
            "reads": dict(READS[auto.method]),
            "bytes_to_read": foretold.bytes_read,
            "host": foretold.host_peak,
            "device": foretold.device_peak,
            "disk_scratch": foretold.disk_scratch,
            "folder": str(self.folder),
        }

    def write_recipe(self, recipe: Recipe) -> Path:
        """Write a chosen recipe beside the scores, as a file that can be used again."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"{recipe.name}-{self.auto.effective_bits:g}.yaml"
        write_recipe(recipe, path)
        return path

    def _write(self, scores: Scores) -> None:
        groups = [{**asdict(g), "scores": scores[g.name]} for g in self.space.groups]
        text = json.dumps({"version": _VERSION, "inputs": self.inputs, "groups": groups}, indent=1)
        path = self.scores_file
        try:
            write_whole(path, text + "\n")
        except OSError as error:
            raise OutputError(
                f"the scores cannot be written to {path} ({error.strerror}); choose another "
                "search_dir (--search-dir)"
            ) from error


def _errors_by_size(group: Group) -> dict[str, float]:
    """Scores that fall by a factor of four with each bit, as squared errors do."""
    return {
        fmt: group.weights * 4.0 ** (-8 * size / group.weights) for fmt, size in group.bytes.items()
    }


def fitting_batches(batches: Sequence[Tensor], vocab_size: int) -> list[Tensor]:
    """Cut batches [B, T] by sequences where their logits would exceed 2**26 elements."""
    return [
        part
        for batch in batches
        for part in batch.split(max(1, _LOGITS // (vocab_size * batch.shape[1])))
    ]
