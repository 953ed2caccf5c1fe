"""Turn finished units into tensors of the export, whatever schedule finished them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from modelopt_lite.calibrate.algorithm import Algorithm
from modelopt_lite.calibrate.algorithms import make_algorithm
from modelopt_lite.calibrate.evidence import Evidence
from modelopt_lite.checkpoint.behind import WriteBehind
from modelopt_lite.checkpoint.dequant import Source
from modelopt_lite.checkpoint.names import natural_key
from modelopt_lite.errors import CalibrationError, NonFiniteError, SpecError
from modelopt_lite.export.quantize import check_finite, matrix_value, quantize_matrices
from modelopt_lite.export.treat import Treated, folds_by_tensor, sites_of
from modelopt_lite.formats import fp8
from modelopt_lite.formats.linear import FORMATS, ErrorReport
from modelopt_lite.offload.store import Loaded
from modelopt_lite.offload.units import Unit
from modelopt_lite.plan import Copy, Matrix, Plan
from modelopt_lite.select import Output
from modelopt_lite.words import counted


class Exporter:
    """Quantizes and writes units, each as soon as its statistics are final.

    Args:
        plan: What to do.
        source: The checkpoint.
        sink: Where tensors go.
        evidence: What calibration saw; filled before a unit is exported.
        verify: Compare packed matrices with the source while it is in memory.
    """

    def __init__(
        self, plan: Plan, source: Source, sink: WriteBehind, evidence: Evidence, verify: bool
    ) -> None:
        self._plan = plan
        self._source = source
        self._sink = sink
        self.evidence = evidence
        self._verify = verify
        self._copies: dict[str, list[Copy]] = {}
        for copy in plan.copies:
            self._copies.setdefault(copy.source, []).append(copy)
        whole = {unit.name: unit.parent or unit.name for unit in plan.units}
        self._matrices: dict[str, list[Matrix]] = {}
        self._scaled: dict[str, list[Matrix]] = {}
        for matrix in plan.matrices:
            self._matrices.setdefault(matrix.unit, []).append(matrix)
            if matrix.input_group is not None:  # what its peers read is known with the whole layer
                self._scaled.setdefault(whole[matrix.unit], []).append(matrix)
        self._parts: dict[str, list[str]] = {}
        for unit in plan.units:
            if unit.parent is not None:
                self._parts.setdefault(unit.parent, []).append(unit.name)
        _check_groups(plan.matrices, whole)
        self._algorithm = make_algorithm(plan.recipe.algorithm, plan.numerics)
        self._folds = folds_by_tensor(plan)
        self._last: Treated | None = None
        self._last_sources: Mapping[str, Tensor] = {}
        self._names: list[str] = []
        self.errors: dict[str, ErrorReport] = {}
        self.input_amax: dict[str, Tensor] = {}

    def export(
        self, unit: Unit, sources: Mapping[str, Tensor], amax: Mapping[str, Tensor]
    ) -> list[str]:
        """Write everything that a unit's tensors become. May be called again for the same unit.

        Args:
            unit: The unit; what it reads has been seen, in full.
            sources: Name on disk -> values, which must not change until the sink has written them.
            amax: Name on disk -> largest magnitude, as `check_finite` gives it.

        Returns:
            The names that they have in the export.
        """
        self._names = []
        if self._algorithm is not None and unit.parent is not None:
            return []  # scales are chosen for the whole layer, which reads its parts again
        matrices, treated = self._matrices.get(unit.name, []), None
        if self._algorithm is not None:
            for part in self._parts.get(unit.name, ()):
                matrices = matrices + self._matrices.get(part, [])
            sources = _ReadThrough(sources, self._source)
            treated = self._treat(self._algorithm, matrices, sources)
            if self._algorithm.sequential:
                self._last, self._last_sources = treated, sources
        self.errors.update(
            quantize_matrices(
                matrices,
                sources,
                amax,
                self._write,
                numerics=self._plan.numerics,
                verify=self._verify,
                treated=treated,
            )
        )
        self._export_input_scales(self._scaled.get(unit.name, []), treated)
        for name, value in list(sources.items()):
            for copy in self._copies.get(name, ()):
                fold = self._folds.get(name)
                kept = value if treated is None or fold is None else treated.folded(fold, value)
                self._write(copy.output, kept[copy.region] if copy.region else kept)
        self._export_cache_scales(unit)
        return self._names

    def _treat(
        self, algorithm: Algorithm, matrices: Sequence[Matrix], sources: Mapping[str, Tensor]
    ) -> Treated:
        """Choose what becomes of a layer's matrices, and forget what entered them."""
        statistics = self.evidence.statistics
        treated = Treated(
            self._plan, algorithm, matrices, lambda m: matrix_value(m, sources), statistics
        )
        statistics.drop(site for m in matrices for site in sites_of(m, m.seen_at))
        return treated

    @property
    def sequential(self) -> bool:
        """Whether layers shall be calibrated on what quantized layers put out."""
        return self._algorithm is not None and self._algorithm.sequential

    def replace(self, loaded: Loaded) -> None:
        """Put what the last exported layer has become into a unit of it that is in memory."""
        assert self._last is not None
        names, experts = self._plan.names, loaded.unit.experts
        for matrix in self._matrices.get(loaded.unit.name, []):
            place = names.place(matrix.source)
            assert place is not None  # as the plan has it
            entry, region = place
            target = loaded.buffers[names.resolve(entry)]
            if loaded.unit.is_stacked and experts is not None and isinstance(region[0], int):
                region = (region[0] - experts.start, *region[1:])
            target = target[region] if region else target
            target = target[matrix.region] if matrix.region else target
            value = self._last.weight(matrix, matrix_value(matrix, self._last_sources))
            turned = matrix.input_major and value.ndim == 2
            target.copy_(value.mT if turned else value)

    def forget(self) -> None:
        """Let go of the last exported layer."""
        self._last, self._last_sources = None, {}

    def sees_inputs(self, unit: Unit) -> bool:
        """Whether what the unit becomes depends on what enters it."""
        return self._algorithm is not None or bool(self._scaled.get(unit.name))

    def findings(self, unit: Unit) -> dict[str, Any]:
        """Return, as JSON values, what was found out about an exported unit."""
        matrices = [
            matrix
            for name in (unit.name, *self._parts.get(unit.name, ()))
            for matrix in self._matrices.get(name, ())
        ]
        sites = dict.fromkeys(site for m in matrices for site in sites_of(m, m.site))
        modules = [kv.module for kv in self._plan.kv_cache if kv.unit == unit.name]
        errors = {m.name: self.errors[m.name] for m in matrices if m.name in self.errors}
        groups = dict.fromkeys(m.input_group for m in matrices if m.input_group)
        amax = {g: float(self.input_amax[g]) for g in groups if g in self.input_amax}
        return {
            "errors": {name: [error.worst, error.relative] for name, error in errors.items()},
            "input_amax": amax,
            **self.evidence.to_json(sites, modules),
        }

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
            missing = [m for m in self._matrices.get(unit.name, []) if not self._is_written(m)]
            if missing:
                names = dict.fromkeys(m.source for m in missing)
                sources = {name: self._source.read(name) for name in names}
                self.export(unit, sources, check_finite(sources))
        for matrices in self._scaled.values():
            self._export_input_scales([m for m in matrices if not self._has_input_scale(m)])
        for copies in self._copies.values():
            for copy in copies:
                if not self._sink.is_taken(copy.output.name):
                    self._copy(copy)

    def _export_input_scales(
        self, matrices: Sequence[Matrix], treated: Treated | None = None
    ) -> None:
        self.input_amax.update(self._inputs(matrices, treated))
        for matrix in matrices:
            scale = FORMATS[matrix.format].input_scale(self.input_amax[str(matrix.input_group)])
            self._write(matrix.outputs["input_scale"], scale)

    def _is_written(self, matrix: Matrix) -> bool:
        outputs = matrix.outputs.items()
        return all(self._sink.is_taken(o.name) for suffix, o in outputs if suffix != "input_scale")

    def _has_input_scale(self, matrix: Matrix) -> bool:
        return self._sink.is_taken(matrix.outputs["input_scale"].name)

    def _write(self, output: Output, tensor: Tensor) -> None:
        again = self._sink.is_taken(output.name)
        self._sink.write(output.name, tensor.to(output.dtype), again=again)
        self._names.append(output.name)

    def _copy(self, copy: Copy) -> None:
        value = self._source.read(copy.source)
        check_finite({copy.source: value})  # no unit was checked as it came in
        self._write(copy.output, value[copy.region] if copy.region else value)

    def _inputs(self, matrices: Sequence[Matrix], treated: Treated | None) -> dict[str, Tensor]:
        """Largest magnitude that entered each input group, over all of its members."""
        amax: dict[str, Tensor] = {}
        for matrix in matrices:
            if matrix.input_group is None:
                continue
            scaled = treated is not None and treated.scales_inputs
            for seen in (
                treated.input_amax(matrix) if treated and scaled else self._seen_amax(matrix)
            ):
                before = amax.get(matrix.input_group)
                amax[matrix.input_group] = seen if before is None else torch.maximum(before, seen)
        for matrix in matrices:
            if matrix.input_group is None:
                continue
            value = amax.get(matrix.input_group)
            if value is None and (found := _of_peers(matrix, matrices, amax)):
                value = amax[matrix.input_group] = torch.stack(found).max()
            if value is None:
                raise _unreached([m for m in matrices if m.input_group not in {None, *amax}])
            if not bool(torch.isfinite(value)):
                raise NonFiniteError(
                    f"the inputs of {matrix.name!r} became NaN or infinite during calibration; "
                    "exclude it in the recipe, or run the model in a wider dtype"
                )
        return amax

    def _seen_amax(self, matrix: Matrix) -> list[Tensor]:
        found = self.evidence.inputs.amax
        return [found[site] for site in sites_of(matrix, matrix.site) if site in found]

    def _export_cache_scales(self, unit: Unit) -> None:
        for scales in self._plan.kv_cache:
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
                self._write(output, fp8.scale_from_amax(found.amax.float()))
                if bias is not None and found.bias is not None:
                    self._write(bias, found.bias)


class _ReadThrough(Mapping[str, Tensor]):
    """A layer's tensors; those of its parts, which left memory, are read from the source again."""

    def __init__(self, inside: Mapping[str, Tensor], source: Source) -> None:
        self._inside = inside
        self._source = source

    def __getitem__(self, name: str) -> Tensor:
        return self._inside[name] if name in self._inside else self._source.read(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._inside)

    def __len__(self) -> int:
        return len(self._inside)


def _unreached(matrices: Sequence[Matrix]) -> CalibrationError:
    """The error for matrices of one unit whose inputs were never seen."""
    first = matrices[0]
    parents = {m.name.rpartition(".")[0].removeprefix(f"{m.unit}.") for m in matrices}
    patterns = ", ".join(f'"*.{parent}"' for parent in sorted(parents, key=natural_key))
    return CalibrationError(
        f"no calibration data reached {first.name!r} (nor its peers; "
        f"{counted(len(matrices), 'matrix', 'matrices')} of unit {first.unit!r} in all), so its "
        "inputs have no scale. Where the model runs it on other inputs only, as attention to an "
        f"encoder, exclude it in the recipe (exclude: [{patterns}]); else give more calibration "
        "data, or use a recipe without static input scales"
    )


def _of_peers(
    matrix: Matrix, matrices: Sequence[Matrix], amax: Mapping[str, Tensor]
) -> list[Tensor]:
    """What entered the same projection of other experts, for an expert that saw nothing."""
    role = matrix.name.rpartition(".")[2]
    groups = {
        str(m.input_group)
        for m in matrices
        if m.experts and m.experts == matrix.experts and m.name.rpartition(".")[2] == role
    }
    return [amax[group] for group in sorted(groups & amax.keys())]


def _check_groups(matrices: Sequence[Matrix], whole: Mapping[str, str]) -> None:
    """Refuse a group of shared scales of which a part would be final before another is seen.

    ``whole`` gives the unit at whose end all inputs of a unit are known.
    """
    first: dict[tuple[str, str], Matrix] = {}
    for matrix in matrices:
        groups = ("weight", matrix.weight_group), ("input", matrix.input_group)
        for kind, group in groups:
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
