"""Carry a prepared job out, into a folder that is not yet in its place."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from modelopt_lite.budgets import Schedule
from modelopt_lite.build import eager_experts
from modelopt_lite.calibrate.algorithms import make_algorithm
from modelopt_lite.calibrate.cache import CacheStats
from modelopt_lite.calibrate.data import CalibrationData
from modelopt_lite.calibrate.evidence import Evidence
from modelopt_lite.calibrate.observe import Site
from modelopt_lite.calibrate.statistics import Statistics
from modelopt_lite.checkpoint.behind import WriteBehind
from modelopt_lite.checkpoint.journal import JOURNAL, Journal
from modelopt_lite.checkpoint.shards import ExportLayout
from modelopt_lite.checkpoint.sidecars import copy_sidecars
from modelopt_lite.checkpoint.writers import ExportWriter
from modelopt_lite.data_free import quantizer_count, run_data_free
from modelopt_lite.export.configs import write_configs
from modelopt_lite.export.exporter import Exporter
from modelopt_lite.export.inputs import sites_of
from modelopt_lite.formats.base import Numerics
from modelopt_lite.formats.cache import CACHE_FORMATS
from modelopt_lite.job import Job, versions
from modelopt_lite.offload.memory import bound_caches, keep_freed
from modelopt_lite.output import writing
from modelopt_lite.pages.card import write_card
from modelopt_lite.pages.layers import layer_bytes
from modelopt_lite.pages.report_page import write_page
from modelopt_lite.parallel.team import Team
from modelopt_lite.pipeline import run_calibrated
from modelopt_lite.plan import Plan
from modelopt_lite.progress import Progress
from modelopt_lite.ranks.crew import Alone, Ranks
from modelopt_lite.ranks.log import RankLog
from modelopt_lite.recipes import Recipe
from modelopt_lite.recipes.written import recipe_text
from modelopt_lite.report import Report, peak_memory_bytes
from modelopt_lite.resume import UnitLog
from modelopt_lite.timeline import Timeline
from modelopt_lite.verify.audit import audit_or_raise
from modelopt_lite.words import counted


@dataclass(slots=True)
class Run:
    """One run of a job into a folder; or what one rank of several does of it."""

    job: Job
    data: CalibrationData | None
    report: Report
    verify: bool
    tell: Progress
    team: Team | None = None
    timeline: Timeline = field(default_factory=Timeline)

    def weights(self, folder: Path, layout: ExportLayout, schedule: Schedule) -> None:
        """Write the weight files, from where a journal beside the folder says that a run ended.

        Args:
            folder: Where to write.
            layout: What to write.
            schedule: What is in memory when.
        """
        job, scratch, tell = self.job, folder.parent, self.timeline.around(self.tell)
        if self.data is not None:
            bound_caches()
        else:
            keep_freed()
        evidence = Evidence(
            cache=cache_stats(job.plan.recipe, job.plan.numerics),
            statistics=input_statistics(job.plan),
        )
        team, follows = self.team, self.team is not None and not self.team.is_first
        if team is not None and follows:
            team.barrier("files")
        journal = Journal(folder.parent / JOURNAL, self.report.details, reads=follows)
        written = [name for entry in journal.entries for name in entry["written"]]
        with (
            ExportWriter(folder, layout, written=written, made=follows) as writer,
            self._log(journal, writer) as log,
        ):
            if team is not None and not follows:
                team.barrier("files")
            with WriteBehind(writer) as sink:
                exporter = Exporter([*job.plans.values()], job.source, sink, evidence, self.verify)
                log.restore(exporter)
                crew: Alone = Alone(exporter)
                if team is not None:
                    count = len(self.data.batches) if self.data is not None else 0
                    crew = Ranks(team, job, exporter, count)
                if self.data is not None:
                    self._calibrated(self.data, exporter, sink, log, schedule, scratch, crew)
                else:
                    with self.report.phase("quantize"):
                        workers = quantizer_count(job.device)
                        run_data_free(job, exporter, sink, log, workers=workers, progress=tell)
                        sink.flush()
            if team is not None:
                team.barrier("written")
            if not follows:
                writer.finish()
        fill_report(self.report, job, exporter, evidence, layout)
        if isinstance(crew, Ranks):
            self._add_ranks(crew)
        self.report.notes += log.notes

    def _log(self, journal: Journal, writer: ExportWriter) -> UnitLog:
        if self.team is None:
            return UnitLog(journal, writer, self.job.device)
        return RankLog(self.team, journal, writer, self.job.device)

    def _add_ranks(self, ranks: Ranks) -> None:
        """Note what each rank took."""
        mine = {
            "bytes_read": self.report.bytes_read,
            "peak_weight_bytes": ranks.peak_weights,
            "peak_memory_bytes": peak_memory_bytes(),
        }
        self.report.ranks = ranks.everyone("usage", mine)
        self.report.bytes_read = sum(rank["bytes_read"] for rank in self.report.ranks)

    def _calibrated(
        self,
        data: CalibrationData,
        exporter: Exporter,
        sink: WriteBehind,
        log: UnitLog,
        schedule: Schedule,
        scratch: Path,
        crew: Alone,
    ) -> None:
        job = self.job
        batches = data.inputs(job.device, job.model.dtype)
        with self.report.phase("calibrate and quantize"), eager_experts(job.model):
            run_calibrated(
                job,
                exporter,
                sink,
                log,
                batches,
                schedule=schedule,
                scratch=scratch,
                progress=self.timeline.around(self.tell),
                crew=crew,
            )
            log.settle()
        with self.report.phase("quantize and copy the rest"):
            if self.team is None or self.team.is_first:
                exporter.export_rest(job.plan.units)
            sink.flush()

    def finish(self, folder: Path) -> None:
        """Write everything but the weights, and audit the whole."""
        job = self.job
        # A config that names no class was read with the model.
        for part, plan in job.plans.items():
            with writing(folder):
                write_configs(folder / part, job.source.config, plan, type(job.model).__name__)
                copy_sidecars(job.folder, folder / part)
                write_card(folder / part, self.report, plan.dialect.name)
            if self.verify:
                with self.report.phase("audit"):
                    audit_or_raise(folder / part, source=job.folder, plan=plan)
        job.source.close()
        self.timeline.mark()
        self.report.timeline = self.timeline.columns()
        self.report.peak_memory_bytes = peak_memory_bytes()
        with writing(folder):
            self.report.write(folder)
            write_page(self.report, folder)


def cache_stats(recipe: Recipe, numerics: Numerics) -> CacheStats:
    """Return what sees the keys and values of a recipe's cache."""
    cache = CACHE_FORMATS.get(recipe.kv_cache or "")
    return CacheStats(affine=cache is not None and cache.affine, numerics=numerics)


def input_statistics(plan: Plan) -> Statistics:
    """Return what gathers the statistics that a plan's algorithm needs."""
    algorithm = make_algorithm(plan.recipe.algorithm, plan.numerics)
    if algorithm is None:
        return Statistics()
    sites = (site for m in plan.matrices for site in sites_of(m, m.seen_at))
    return Statistics(algorithm.kinds, sites, algorithm.row_limit)


def fill_report(
    report: Report, job: Job, exporter: Exporter, evidence: Evidence, layout: ExportLayout
) -> None:
    """Write into a report what a run saw and did."""
    plan = job.plan
    report.dialects = [p.dialect.name for p in job.plans.values()]
    report.beside = plan.beside
    report.recipe_text = recipe_text(plan.recipe)
    report.export_bytes = layout.total_size
    first = next(iter(layout.parts.values()))
    report.layer_bytes = layer_bytes(
        ((info.name, info.nbytes) for info in job.source.tensors.values()),
        ((info.name, info.nbytes) for info in first.tensors.values()),
    )
    report.quantized = {m.name: m.format for m in plan.matrices}
    report.excluded = plan.excluded
    report.notes += dict.fromkeys(note for p in job.plans.values() for note in p.notes)
    report.fallbacks += plan.fallbacks
    errors = {m.name: exporter.errors[m.name] for m in plan.matrices if m.name in exporter.errors}
    report.relative_errors = {name: e.relative for name, e in errors.items()}
    report.beyond_bound = [name for name, e in errors.items() if not e.worst <= 1]
    report.input_amax = {group: float(amax) for group, amax in exporter.input_amax.items()}
    report.tokens_per_expert, report.cold_experts = expert_usage(plan, evidence)
    if skipped := [n for n, why in plan.excluded.items() if why.startswith(("shape", "engines"))]:
        report.fallbacks.append(
            f"{counted(len(skipped), 'matrix', 'matrices')} left unquantized for the shape, or "
            "that of a sibling which engines fuse with it"
        )
    report.source_bytes = sum(info.nbytes for info in job.source.tensors.values())
    report.parameters = sum(info.numel for info in job.source.tensors.values())
    report.bytes_read = job.source.bytes_read


def expert_usage(plan: Plan, evidence: Evidence) -> tuple[dict[str, list[int]], list[str]]:
    """Return rows seen by each expert of each layer, and the experts that saw none."""
    rows: dict[str, dict[int, int]] = {}
    for m in plan.matrices:
        if m.experts is None or not (m.input_group or plan.recipe.algorithm.needs_inputs):
            continue
        seen = evidence.inputs.rows
        if m.expert is None and len(m.shape) == 3:
            counts = {e: seen.get(Site(m.entry, e), 0) for e in range(m.shape[0])}
        else:
            number = m.name.removeprefix(f"{m.experts}.").split(".")[0]
            counts = {int(number): seen.get(m.site, 0)}
        for expert, count in counts.items():
            table = rows.setdefault(m.experts, {})
            table[expert] = max(count, table.get(expert, 0))
    tokens = {name: [table[e] for e in sorted(table)] for name, table in rows.items()}
    cold = [f"{name}.{e}" for name, table in rows.items() for e in sorted(table) if not table[e]]
    return tokens, cold


def run_details(job: Job, data: CalibrationData | None, options: dict[str, Any]) -> dict[str, Any]:
    """Return all that the bytes of an export depend on: inputs, options and versions."""
    details: dict[str, Any] = {
        "source": str(job.folder),
        "source_fingerprint": job.source.fingerprint(),
        "recipe": asdict(job.plan.recipe),
        "numerics": job.plan.numerics,
        "options": options,
        "versions": versions(job),
    }
    if data is not None:
        details["calibration"] = {
            "origin": data.origin,
            "samples": data.samples,
            "tokens": data.tokens,
            "sha256": data.fingerprint(),
        }
    return details
