"""Run a plan: calibrate in lockstep, quantize each unit while it is in memory, write it, go on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from modelopt_lite.calibrate.all_experts import calibrate_all_experts
from modelopt_lite.calibrate.attention import watch_attention
from modelopt_lite.calibrate.cache import CacheStats
from modelopt_lite.calibrate.observe import InputStats, InputWatch, Site
from modelopt_lite.checkpoint.dequant import Source
from modelopt_lite.checkpoint.writer import StreamingWriter
from modelopt_lite.errors import CalibrationError, NonFiniteError, SpecError
from modelopt_lite.export.quantize import check_finite, quantize_matrices
from modelopt_lite.formats import fp8
from modelopt_lite.formats.linear import ErrorReport
from modelopt_lite.offload.lockstep import Lockstep
from modelopt_lite.offload.memory import release_freed
from modelopt_lite.offload.units import Unit, WeightStore, output_head
from modelopt_lite.plan import Copy, Matrix, Plan
from modelopt_lite.progress import Progress
from modelopt_lite.select import Output


@dataclass(slots=True)
class Evidence:
    """What calibration saw."""

    inputs: InputStats = field(default_factory=InputStats)
    cache: CacheStats = field(default_factory=CacheStats)


class Exporter:
    """Quantizes and writes units, each as soon as its statistics are final.

    Args:
        plan: What to do.
        source: The checkpoint.
        writer: Where tensors go.
        evidence: What calibration saw; filled before a unit is exported.
        verify: Compare packed matrices with the source while it is in memory.
    """

    def __init__(
        self, plan: Plan, source: Source, writer: StreamingWriter, evidence: Evidence, verify: bool
    ) -> None:
        self._plan = plan
        self._source = source
        self._writer = writer
        self._evidence = evidence
        self._verify = verify
        self._copies: dict[str, list[Copy]] = {}
        for copy in plan.copies:
            self._copies.setdefault(copy.source, []).append(copy)
        self._matrices: dict[str, list[Matrix]] = {}
        for matrix in plan.matrices:
            self._matrices.setdefault(matrix.unit, []).append(matrix)
        _check_groups(plan.matrices)
        self._written: set[str] = set()
        self.errors: dict[str, ErrorReport] = {}
        self.input_amax: dict[str, Tensor] = {}

    def export(self, unit: Unit, sources: dict[str, Tensor]) -> None:
        """Write everything that a unit's tensors become. May be called again for the same unit."""
        matrices = self._matrices.get(unit.name, [])
        self.input_amax.update(self._inputs(matrices))
        self.errors.update(
            quantize_matrices(
                matrices,
                sources,
                self.input_amax,
                self._write,
                numerics=self._plan.numerics,
                verify=self._verify,
            )
        )
        for name, value in sources.items():
            for copy in self._copies.get(name, ()):
                self._write(copy.output, value[copy.region] if copy.region else value)
        self._export_cache_scales(unit)

    def export_rest(self, units: Sequence[Unit]) -> None:
        """Write what no forward pass brought in: units that did not run, and foreign tensors."""
        for unit in units:
            missing = [m for m in self._matrices.get(unit.name, []) if not self._is_written(m)]
            if missing:
                names = dict.fromkeys(m.source for m in missing)
                self.export(unit, {name: self._source.read(name) for name in names})
        for copies in self._copies.values():
            for copy in copies:
                if copy.output.name not in self._written:
                    self._copy(copy)

    def _is_written(self, matrix: Matrix) -> bool:
        return all(output.name in self._written for output in matrix.outputs.values())

    def _write(self, output: Output, tensor: Tensor) -> None:
        again = output.name in self._written
        self._writer.write(output.name, tensor.to(output.dtype), again=again)
        self._written.add(output.name)

    def _copy(self, copy: Copy) -> None:
        """Copy a tensor's bytes from file to file where they are what is to be written."""
        decoded = copy.source in getattr(self._source, "consumed", {})
        cast = copy.output.dtype != self._source.tensors[copy.source].dtype
        if copy.region or decoded or cast:
            value = self._source.read(copy.source)
            self._write(copy.output, value[copy.region] if copy.region else value)
            return
        self._writer.copy(copy.output.name, self._source.tensors[copy.source])
        self._written.add(copy.output.name)

    def _inputs(self, matrices: Sequence[Matrix]) -> dict[str, Tensor]:
        """Largest magnitude that entered each input group, over all of its members."""
        amax: dict[str, Tensor] = {}
        for matrix in matrices:
            if matrix.input_group is None:
                continue
            for site in self._sites(matrix):
                seen = self._evidence.inputs.amax.get(site)
                if seen is None:
                    continue
                before = amax.get(matrix.input_group)
                amax[matrix.input_group] = seen if before is None else torch.maximum(before, seen)
        for matrix in matrices:
            if matrix.input_group is None:
                continue
            value = amax.get(matrix.input_group)
            if value is None:
                raise CalibrationError(
                    f"no calibration data reached {matrix.name!r} (or any of its peers), so its "
                    "inputs have no scale; give more calibration data, exclude the module in the "
                    "recipe, or use a recipe without static input scales"
                )
            if not bool(torch.isfinite(value)):
                raise NonFiniteError(
                    f"the inputs of {matrix.name!r} became NaN or infinite during calibration; "
                    "exclude it in the recipe, or run the model in a wider dtype"
                )
        return amax

    def _sites(self, matrix: Matrix) -> list[Site]:
        if matrix.expert is None and len(matrix.shape) == 3:
            return [Site(matrix.entry, expert) for expert in range(matrix.shape[0])]
        return [matrix.site]

    def _export_cache_scales(self, unit: Unit) -> None:
        for scales in self._plan.kv_cache:
            if scales.unit != unit.name:
                continue
            for output, bias, seen in (
                (scales.key, scales.key_bias, self._evidence.cache.key),
                (scales.value, scales.value_bias, self._evidence.cache.value),
            ):
                if scales.module not in seen:
                    raise CalibrationError(
                        f"no keys or values of the attention layer {scales.module!r} were seen, so "
                        "its KV cache has no scales; run without kv_cache"
                    )
                found = seen[scales.module]
                self._write(output, fp8.scale_from_amax(found.amax.float()))
                if bias is not None and found.bias is not None:
                    self._write(bias, found.bias)


def _check_groups(matrices: Sequence[Matrix]) -> None:
    """Refuse a group of shared scales of which a part would be final before another is seen."""
    first: dict[tuple[str, str], Matrix] = {}
    for matrix in matrices:
        for kind, group in (("weight", matrix.weight_group), ("input", matrix.input_group)):
            if group is None:
                continue
            other = first.setdefault((kind, group), matrix)
            if other.unit != matrix.unit:
                raise SpecError(
                    f"{other.name!r} and {matrix.name!r} share a scale, and no layer of the model "
                    "holds both; name the classes of its decoder layers in a spec "
                    "(models/README.md: layer_names)"
                )


def run_calibrated(
    plan: Plan,
    model: nn.Module,
    store: WeightStore,
    exporter: Exporter,
    evidence: Evidence,
    batches: Sequence[Tensor],
    *,
    resident: bool,
    model_type: str,
    all_experts: bool,
    progress: Progress,
) -> None:
    """Calibrate and export unit by unit (or, resident, all units after all batches)."""
    watch = InputWatch(evidence.inputs.visit)
    watched = {m.entry for m in plan.matrices if m.input_group is not None}
    with ExitStack() as stack:
        skipped = stack.enter_context(without_head(model, plan))
        if plan.kv_cache:
            stack.enter_context(watch_attention(model, evidence.cache.visit))
        if all_experts:
            stack.enter_context(calibrate_all_experts(model, model_type, watch))
        stack.enter_context(torch.inference_mode())
        units = [unit for unit in plan.units if unit.name not in skipped]

        def forward(batch: Tensor) -> None:
            with watch:
                model(input_ids=batch, use_cache=False)

        passes = [partial(forward, batch) for batch in batches]
        walk = _Walk(model, store, exporter, watch, watched, units, progress)
        if resident:
            walk.resident(passes)
        else:
            walk.lockstep(passes)


class _Walk:
    """The two schedules over the same units: everything resident, or one unit at a time."""

    def __init__(
        self,
        model: nn.Module,
        store: WeightStore,
        exporter: Exporter,
        watch: InputWatch,
        watched: set[str],
        units: list[Unit],
        progress: Progress,
    ) -> None:
        self._model = model
        self._store = store
        self._exporter = exporter
        self._watch = watch
        self._watched = watched
        self._units = {unit.name: unit for unit in units}
        self._progress = progress
        self._sources: dict[str, dict[str, Tensor]] = {}

    def resident(self, passes: Sequence[Callable[[], None]]) -> None:
        for name in self._units:
            self._enter(name)
        for index, run in enumerate(passes):
            run()
            self._progress("calibrate", index + 1, len(passes))
        for index, name in enumerate(self._units):
            self._leave(name)
            self._progress("export", index + 1, len(self._units))

    def lockstep(self, passes: Sequence[Callable[[], None]]) -> None:
        modules = {name: self._model.get_submodule(name) for name in self._units if name}
        done: set[str] = set()

        def leave(name: str) -> None:
            self._leave(name)
            release_freed()
            done.add(name)
            self._progress("unit " + name, len(done), len(modules))

        if "" in self._units:  # entries that no unit module holds stay for the whole run
            self._enter("")
        Lockstep(modules, enter=self._enter, leave=leave).run(passes)
        if "" in self._units:
            self._leave("")

    def _enter(self, name: str) -> None:
        unit = self._units[name]
        self._sources[name] = self._store.bring_in(unit)
        check_finite(self._sources[name])  # here, where it can be named: products spread it
        entries = self._model.state_dict(keep_vars=True) if not name else None
        self._watch.watch(
            {
                entry: entries[entry] if entries else self._model.get_parameter(entry)
                for entry in unit.entries
                if entry in self._watched
            }
        )

    def _leave(self, name: str) -> None:
        unit = self._units[name]
        self._exporter.export(unit, self._sources.pop(name))
        self._store.take_out(unit)


@contextmanager
def without_head(model: Any, plan: Plan) -> Iterator[set[str]]:
    """Spare the output head, the largest product of all, where nothing depends on it.

    Its module gives an empty result while this lasts. Yields the names of the units left out.
    """
    found = output_head(model)
    if found is None or any(matrix.unit == found[0] for matrix in plan.matrices):
        yield set()
        return
    name, head = found
    own_forward = "forward" in head.__dict__
    before = head.forward
    head.forward = lambda x, *args, **kwargs: x.new_zeros((*x.shape[:-1], 0))
    try:
        yield {name}
    finally:
        if own_forward:
            head.forward = before
        else:
            del head.forward
