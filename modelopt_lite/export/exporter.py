"""Turn finished units into tensors of the export, whatever schedule finished them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from modelopt_lite.calibrate.algorithm import Algorithm
from modelopt_lite.calibrate.algorithms import make_algorithm
from modelopt_lite.calibrate.evidence import Evidence
from modelopt_lite.calibrate.observe import Site
from modelopt_lite.checkpoint.behind import WriteBehind
from modelopt_lite.checkpoint.dequant import Source
from modelopt_lite.errors import CalibrationError, SpecError
from modelopt_lite.export.inputs import amax_of_groups, sites_of
from modelopt_lite.export.made import Made
from modelopt_lite.export.quantize import (
    Write,
    check_finite,
    matrix_value,
    quantize_matrices,
)
from modelopt_lite.export.sources import ReadThrough, RowsOfStacks
from modelopt_lite.export.treat import Sharing, Treated, folds_by_tensor
from modelopt_lite.formats import fp8
from modelopt_lite.formats.base import rounded_up
from modelopt_lite.formats.errors import ErrorReport
from modelopt_lite.formats.linear import FORMATS
from modelopt_lite.offload.store import Loaded
from modelopt_lite.offload.units import Unit
from modelopt_lite.plan import Copy, Matrix, Plan
from modelopt_lite.select import Output


class _Destination:
    """An export in one dialect: its plan by unit, and what precedes its names in the sink."""

    def __init__(self, plan: Plan, prefix: str, whole: Mapping[str, str]) -> None:
        self.plan = plan
        self.prefix = prefix
        self._numbered: dict[str, list[tuple[int, Matrix]]] = {}
        self.scaled: dict[str, list[Matrix]] = {}
        for number, matrix in enumerate(plan.matrices):
            self._numbered.setdefault(matrix.unit, []).append((number, matrix))
            if matrix.input_group is not None:  # what its peers read is known with the whole layer
                self.scaled.setdefault(whole[matrix.unit], []).append(matrix)

    def of_units(self, units: Sequence[str]) -> list[Matrix]:
        """The matrices of some units, in the plan's order: sums over them depend on it.

        A layer whose experts are units of their own thus gives what it gives as a whole.
        """
        found = [numbered for name in units for numbered in self._numbered.get(name, ())]
        return [matrix for _, matrix in sorted(found, key=itemgetter(0))]

    def input_outputs(self, matrix: Matrix) -> dict[str, Output]:
        """The tensors that stand for the scale of a matrix's inputs."""
        part_of = self.plan.dialect.part_of
        return {k: o for k, o in matrix.outputs.items() if part_of(k) == "input_scale"}


class Exporter:
    """Quantizes and writes units, each as soon as its statistics are final.

    Args:
        plans: What to do, a plan for each dialect, which differ in nothing else. With several, the
            names that reach the sink begin with their dialect's and a slash.
        source: The checkpoint.
        sink: Where tensors go.
        evidence: What calibration saw; filled before a unit is exported.
        verify: Compare packed matrices with the source while it is in memory.
    """

    def __init__(
        self,
        plans: Sequence[Plan],
        source: Source,
        sink: WriteBehind,
        evidence: Evidence,
        verify: bool,
    ) -> None:
        self._plan = plan = plans[0]
        self._source = source
        self._sink = sink
        self.evidence = evidence
        self._verify = verify
        self._copies: dict[str, list[Copy]] = {}
        for copy in plan.copies:
            self._copies.setdefault(copy.source, []).append(copy)
        whole = {unit.name: unit.parent or unit.name for unit in plan.units}
        self._destinations = [
            _Destination(plan, f"{plan.dialect.name}/" if len(plans) > 1 else "", whole)
            for plan in plans
        ]
        self._parts: dict[str, list[str]] = {}
        for unit in plan.units:
            if unit.parent is not None:
                self._parts.setdefault(unit.parent, []).append(unit.name)
        _check_groups(plan.matrices, whole)
        self._algorithm = make_algorithm(plan.recipe.algorithm, plan.numerics)
        self._folds = folds_by_tensor(plan)
        self._chosen: dict[str, Treated] = {}  # beforehand
        self._last: Treated | None = None
        self._last_sources: Mapping[str, Tensor] = {}
        self.errors: dict[str, ErrorReport] = {}
        self.input_amax: dict[str, Tensor] = {}

    def export(
        self,
        unit: Unit,
        sources: Mapping[str, Tensor],
        amax: Mapping[str, Tensor],
        *,
        own: Sequence[str] | None = None,
    ) -> list[str]:
        """Write everything that a unit's tensors become; from any thread, one for each unit.

        May be called again for the same unit.

        Args:
            unit: The unit; what it reads has been seen, in full.
            sources: Name on disk -> values, which must not change until the sink has written them.
            amax: Name on disk -> largest magnitude, as `check_finite` gives it.
            own: Where an algorithm treats a whole layer: which of it and its parts are exported
                here; None: all. Scales of inputs that it sets are chosen with all in view.

        Returns:
            The names that they have in the export.
        """
        names: list[str] = []
        units, treated = [unit.name], None
        if unit.of_stack and unit.experts is not None:
            sources = RowsOfStacks(sources, unit.experts)
        if self._algorithm is not None:
            if unit.parent is not None:
                return []  # scales are chosen for the whole layer, which reads its parts again
            whole = [unit.name, *self._parts.get(unit.name, ())]
            units = whole if own is None else list(own)
            sets_inputs = self._plan.recipe.algorithm.sets_inputs and unit.name in units
            matrices = self._destinations[0].of_units(whole if sets_inputs else units)
            sources = ReadThrough(sources, self._source)
            treated = self._chosen.pop(unit.name, None)
            treated = treated or self._treat(self._algorithm, matrices, sources)
            if self._algorithm.sequential:
                self._last, self._last_sources = treated, sources
        for to in self._destinations:
            write = partial(self._write, to, names)
            found = quantize_matrices(
                to.of_units(units),
                sources,
                amax,
                write,
                numerics=self._plan.numerics,
                dialect=to.plan.dialect,
                verify=self._verify,
                treated=treated,
                powers=self._source.powers,
            )
            for name, error in found.items():
                before = self.errors.get(name, error)
                self.errors[name] = before if before.worst > error.worst else error
            if unit.name in units:
                self._export_input_scales(to, to.scaled.get(unit.name, []), write, treated)
                self._export_cache_scales(to, unit, write)
        for name, value in list(sources.items()) if unit.name in units else ():
            fold = self._folds.get(name)
            kept = value if treated is None or fold is None else treated.folded(fold, value)
            for copy in self._copies.get(name, ()):
                self._write_copy(copy, kept, names)
        return names

    def choose(self, unit: Unit, sources: Mapping[str, Tensor], shared: Sharing) -> Treated:
        """Choose, with other processes, what becomes of a layer's matrices, before it is exported.

        Args:
            unit: The layer; what its own matrices read has been seen, in full.
            sources: Of its tensors outside of its parts, as for `export`.
            shared: How; every process calls this.
        """
        assert self._algorithm is not None
        matrices = self._of_whole(unit)
        sources = ReadThrough(sources, self._source)
        self._chosen[unit.name] = self._treat(self._algorithm, matrices, sources, shared)
        return self._chosen[unit.name]

    def _treat(
        self,
        algorithm: Algorithm,
        matrices: Sequence[Matrix],
        sources: Mapping[str, Tensor],
        shared: Sharing | None = None,
    ) -> Treated:
        """Choose what becomes of a layer's matrices, and forget what entered them."""
        statistics = self.evidence.statistics
        treated = Treated(
            self._plan, algorithm, matrices, lambda m: matrix_value(m, sources), statistics, shared
        )
        statistics.drop(site for m in matrices for site in sites_of(m, m.seen_at))
        return treated

    @property
    def searches(self) -> bool:
        """Whether an algorithm chooses for whole layers."""
        return self._algorithm is not None

    @property
    def sequential(self) -> bool:
        """Whether layers shall be calibrated on what quantized layers put out."""
        return self._algorithm is not None and self._algorithm.sequential

    @property
    def rounded(self) -> bool:
        """Whether all batches run a second time, with rounded inputs; see `Algorithm`."""
        return self._algorithm is not None and self._algorithm.rounded

    def replace(self, loaded: Loaded) -> None:
        """Put what the last exported layer has become into a unit of it that is in memory."""
        for made in self.made([loaded.unit.name]):
            if made.entry in loaded.buffers:  # not of experts that are one tensor on disk
                made.put_into(loaded)

    def made(self, units: Sequence[str]) -> Iterator[Made]:
        """Yield what the matrices of some units of the last exported layer have become."""
        assert self._last is not None
        names = self._plan.names
        for matrix in self._destinations[0].of_units(units):
            place = names.place(matrix.source)
            assert place is not None  # as the plan has it
            value = self._last.weight(matrix, matrix_value(matrix, self._last_sources))
            turned = matrix.input_major and value.ndim == 2
            entry, region = place
            inner = matrix.region
            if not region and inner:  # an expert of a stack on disk
                region, inner = inner[:1], inner[1:]
                if names.by_source[matrix.source].turned:
                    turned = not turned
                    inner = (*inner, slice(None))[:2][::-1]
            yield Made(names.resolve(entry), region, inner, value.mT if turned else value)

    def forget(self) -> None:
        """Let go of the last exported layer."""
        self._last, self._last_sources = None, {}

    def sees_inputs(self, unit: Unit) -> bool:
        """Whether what the unit becomes depends on what enters it."""
        return self._algorithm is not None or bool(self._destinations[0].scaled.get(unit.name))

    def findings(self, unit: Unit) -> dict[str, Any]:
        """Return, as JSON values, what was found out about an exported unit."""
        matrices = self._of_whole(unit)
        modules = [kv.module for kv in self._plan.kv_cache if kv.unit == unit.name]
        errors = self.errors_of(unit)
        groups = dict.fromkeys(m.input_group for m in matrices if m.input_group)
        amax = {g: float(self.input_amax[g]) for g in groups if g in self.input_amax}
        return {
            "errors": {name: [error.worst, error.relative] for name, error in errors.items()},
            "input_amax": amax,
            **self.evidence.to_json(self.sites(unit), modules),
        }

    def sites(self, unit: Unit) -> list[Site]:
        """Return where the inputs of a unit's matrices are seen, those of its parts among them."""
        found = (site for m in self._of_whole(unit) for site in sites_of(m, m.site))
        return list(dict.fromkeys(found))

    def searched(self, unit: Unit) -> list[Site]:
        """Return where an algorithm looks at the inputs of a unit's matrices."""
        found = (site for m in self._of_whole(unit) for site in sites_of(m, m.seen_at))
        return list(dict.fromkeys(found))

    def errors_of(self, unit: Unit) -> dict[str, ErrorReport]:
        """Return how far the unit's matrices are from their sources, as far as it was measured."""
        names = (m.name for m in self._of_whole(unit))
        return {name: self.errors[name] for name in names if name in self.errors}

    def _of_whole(self, unit: Unit) -> list[Matrix]:
        return self._destinations[0].of_units([unit.name, *self._parts.get(unit.name, ())])

    def restore(self, findings: Mapping[str, Any]) -> None:
        """Take the findings of an earlier run about a unit that it exported."""
        for name, (worst, relative) in findings["errors"].items():
            self.errors[name] = ErrorReport(worst, relative)
        self.evidence.add_json(findings)
        amax = findings["input_amax"].items()
        self.input_amax.update({group: torch.tensor(value) for group, value in amax})

    def export_rest(self, units: Sequence[Unit]) -> None:
        """Write what no forward pass brought in: units that did not run, and foreign tensors."""
        for unit in units:
            matrices = self._destinations[-1].of_units([unit.name])
            missing = [m for m in matrices if not self._is_written(m)]
            if missing:
                names = dict.fromkeys(m.source for m in missing)
                sources = {name: self._source.read(name) for name in names}
                self.export(unit, sources, check_finite(sources))
        for to in self._destinations:
            for scaled in to.scaled.values():
                lacking = [m for m in scaled if not self._has_input_scale(to, m)]
                self._export_input_scales(to, lacking, partial(self._write, to, []))
        last = self._destinations[-1]
        for copies in self._copies.values():
            for copy in copies:
                if not self._sink.is_taken(last.prefix + copy.output.name):
                    value = self._source.read(copy.source)
                    check_finite({copy.source: value})  # no unit was checked as it came in
                    self._write_copy(copy, value, [])

    def _export_input_scales(
        self,
        to: _Destination,
        matrices: Sequence[Matrix],
        write: Write,
        treated: Treated | None = None,
    ) -> None:
        def seen(matrix: Matrix) -> list[Tensor]:
            chosen = treated.input_amax(matrix) if treated is not None else []
            return chosen or self._seen_amax(matrix)

        self.input_amax.update(amax_of_groups(matrices, seen))
        for matrix in matrices:
            fmt = FORMATS[matrix.format]
            scale = fmt.input_scale(self.input_amax[str(matrix.input_group)])
            stored = to.plan.dialect.encode(fmt, {"input_scale": scale}, matrix.shape)
            for suffix, output in to.input_outputs(matrix).items():
                write(output, rounded_up(stored[suffix], output.dtype))

    def _is_written(self, matrix: Matrix) -> bool:
        to = self._destinations[-1]  # of several, the last that is written to
        apart = {output.name for output in to.input_outputs(matrix).values()}
        names = {output.name for output in matrix.outputs.values()} - apart
        return all(self._sink.is_taken(to.prefix + name) for name in names)

    def _has_input_scale(self, to: _Destination, matrix: Matrix) -> bool:
        outputs = to.input_outputs(matrix).values()
        return all(self._sink.is_taken(to.prefix + output.name) for output in outputs)

    def _write(self, to: _Destination, names: list[str], output: Output, tensor: Tensor) -> None:
        name = to.prefix + output.name
        self._sink.write(name, tensor.to(output.dtype), again=self._sink.is_taken(name))
        names.append(name)

    def _write_copy(self, copy: Copy, value: Tensor, names: list[str]) -> None:
        for to in self._destinations:
            self._write(to, names, copy.output, value[copy.region] if copy.region else value)

    def _seen_amax(self, matrix: Matrix) -> list[Tensor]:
        found = self.evidence.inputs.amax
        return [found[site] for site in sites_of(matrix, matrix.site) if site in found]

    def _export_cache_scales(self, to: _Destination, unit: Unit, write: Write) -> None:
        for scales in to.plan.kv_cache:
            if scales.unit != unit.name:
                continue
            for output, bias, seen in (
                (scales.key, scales.key_bias, self.evidence.cache.key),
                (scales.value, scales.value_bias, self.evidence.cache.value),
            ):
                if scales.module not in seen:
                    raise CalibrationError(
                        f"no keys or values of the attention layer {scales.module!r} were seen, so "
                        "its KV cache has no scales; run without kv_cache"
                    )
                found = seen[scales.module]
                scale = rounded_up(fp8.scale_from_amax(found.amax.float()), output.dtype)
                write(output, scale.reshape(output.shape))
                if bias is not None and found.bias is not None:
                    write(bias, found.bias)


def _check_groups(matrices: Sequence[Matrix], whole: Mapping[str, str]) -> None:
    """Refuse a group of shared scales of which a part would be final before another is seen.

    ``whole`` gives the unit at whose end all inputs of a unit are known.
    """
    first: dict[tuple[str, str], Matrix] = {}
    for matrix in matrices:
        for kind, group in (("weight", matrix.weight_group), ("input", matrix.input_group)):
            if group is None:
                continue
            other = first.setdefault((kind, group), matrix)
            ends = [whole[m.unit] if kind == "input" else m.unit for m in (other, matrix)]
            if ends[0] != ends[1]:
                raise SpecError(
                    f"{other.name!r} and {matrix.name!r} share a scale, and no layer of the model "
                    "holds both; name the classes of its decoder layers in a spec "
                    "(models/README.md: layer_names)"
                )
