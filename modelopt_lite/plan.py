"""The plan: everything that a run will do, settled before a weight is read.

Which tensor gets which format and why the others do not, what is written under which name, shape
and dtype, which scales are shared, in which units the model streams. The run executes the plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import torch

from modelopt_lite.apply import apply_recipe, regroup
from modelopt_lite.cache_scales import KVCacheScale, find_caches
from modelopt_lite.calibrate.algorithms import check_formats, check_stacks
from modelopt_lite.calibrate.observe import Site
from modelopt_lite.checkpoint.names import NameMap, Region, natural_key
from modelopt_lite.dialects.base import Dialect
from modelopt_lite.dialects.modelopt import ModelOpt
from modelopt_lite.errors import RecipeError, SpecError
from modelopt_lite.formats.base import Numerics, TensorSpec
from modelopt_lite.formats.cache import CACHE_FORMATS, CacheFormat
from modelopt_lite.formats.linear import FORMATS, LinearFormat, get_format
from modelopt_lite.formats.smoothed import PRE_QUANT_SCALE
from modelopt_lite.models import get_spec
from modelopt_lite.models.specs import ModelSpec, PTQSpec, ptq_facts
from modelopt_lite.offload.units import Unit
from modelopt_lite.parts import factor_of, matrix_parts
from modelopt_lite.readers import Fold, Readers, find_readers, fused_group, input_group
from modelopt_lite.recipes import Recipe
from modelopt_lite.select import (
    Candidate,
    Output,
    check_shapes,
    find_candidates,
)
from modelopt_lite.structure import Structure, TensorShape


@dataclass(frozen=True, slots=True)
class Matrix:
    """A matrix that is quantized.

    Attributes:
        name: Its module's name in the export.
        source: The tensor on disk; ``region`` is the part of it that it fills.
        shape: [R, K], or as on disk for stacked experts.
        input_major: The reduction axis comes first on disk.
        format: Name of its format.
        parts: The tensors of the export that it becomes, as the plan's dialect keeps them;
            ``outputs`` has their names.
        stacked: It is all experts of a layer; then ``name`` is that of its tensor.
        weight_group: Matrices of one group share the amax of their weights.
        input_group: Matrices of one group share the amax of their inputs; None: inputs need none.
        entry: The parameter of the model that multiplies its inputs; ``expert`` which of a stack.
        unit: The unit that holds the parameter.
        reads: Matrices with the same value read the same tensor, and share a scale of its channels.
        seen_at: The site at which what it reads is looked at; of several that read the same, one.
    """

    name: str
    source: str
    region: Region
    shape: tuple[int, ...]
    input_major: bool
    format: str
    parts: tuple[TensorSpec, ...]
    stacked: bool
    weight_group: str
    input_group: str | None
    entry: str
    expert: int | None
    experts: str | None
    unit: str
    reads: str
    seen_at: Site

    @property
    def site(self) -> Site:
        """Where its inputs are seen."""
        return Site(self.entry, self.expert)

    @property
    def keeps_scale(self) -> bool:
        """Whether the export has the scale of the channels of its inputs."""
        return any(part.suffix == PRE_QUANT_SCALE for part in self.parts)

    @property
    def keeps_factors(self) -> bool:
        """Whether the export has low-rank factors beside it."""
        return any(factor_of(part.suffix) for part in self.parts)

    @property
    def outputs(self) -> dict[str, Output]:
        """Suffix ("weight", "weight_scale", …) -> the tensor of the export.

        Made when asked for: a large model has hundreds of thousands.
        """
        return {
            part.suffix: Output(self._output_name(part.suffix), part.dtype, part.shape)
            for part in self.parts
        }

    def _output_name(self, suffix: str) -> str:
        if not self.stacked or self.source.endswith(".weight"):
            return f"{self.name}.{suffix}"
        return self.name if suffix == "weight" else f"{self.name}_{suffix}"


@dataclass(frozen=True, slots=True)
class Copy:
    """A tensor of the export with the values that the source has, or a part of one."""

    source: str
    region: Region
    output: Output


@dataclass(slots=True)
class Plan:
    """What a run does.

    Attributes:
        recipe: The recipe.
        numerics: "exact", or "modelopt" for the bytes of NVIDIA Model Optimizer.
        matrices: What is quantized.
        copies: What is not, by the name in the export.
        kv_cache: Scales of the key and value cache.
        excluded: Module on disk -> why it is not quantized.
        units: How the model is streamed, in the order of its modules.
        by_tensor: Units are runs of tensors on disk instead, and hold names on disk.
        folds: Tensors outside of ``matrices`` that take up a scale of what matrices read.
        rows: Matrix -> the matrix whose scale its rows take up.
        notes: What a user should know.
        fallbacks: Where the plan departs from what was asked; ``strict`` makes that a failure.
        dialect: How the export names, shapes and describes tensors; see `export.translate`.
    """

    recipe: Recipe
    numerics: Numerics
    names: NameMap
    spec: ModelSpec | None
    matrices: list[Matrix]
    copies: list[Copy]
    kv_cache: list[KVCacheScale]
    excluded: dict[str, str]
    unquantized: list[str]
    units: list[Unit]
    by_tensor: bool = False
    folds: list[Fold] = field(default_factory=list)
    rows: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    fallbacks: list[str] = field(default_factory=list)
    dialect: Dialect = field(default_factory=ModelOpt)

    @property
    def formats(self) -> list[LinearFormat]:
        """The formats of the quantized matrices, in the order in which they appear."""
        return [FORMATS[name] for name in dict.fromkeys(m.format for m in self.matrices)]

    @property
    def outputs(self) -> list[Output]:
        """Every tensor of the export, in order; made when asked for."""
        outputs = [copy.output for copy in self.copies]
        outputs += [output for m in self.matrices for output in m.outputs.values()]
        outputs += [output for kv in self.kv_cache for output in kv.outputs]
        return sorted(outputs, key=lambda output: natural_key(output.name))

    @property
    def needs_calibration(self) -> bool:
        """Whether any scale depends on the inputs that the model sees."""
        searched = bool(self.matrices) and self.recipe.algorithm.needs_inputs
        return searched or bool(self.kv_cache) or any(m.input_group for m in self.matrices)

    @property
    def keeps_scales(self) -> bool:
        """Whether some scale of inputs stays in the export, as ``pre_quant_scale``."""
        return any(m.keeps_scale for m in self.matrices)

    @property
    def beside(self) -> str:
        """What the modelopt dialect keeps beside matrices: ``scale``, ``factors``, or nothing."""
        if any(m.keeps_factors for m in self.matrices):
            return "factors"
        return "scale" if self.keeps_scales else ""


def make_plan(
    structure: Structure,
    tensors: Mapping[str, TensorShape],
    recipe: Recipe,
    *,
    model_type: str,
    numerics: Numerics = "exact",
    on_bad_shape: str = "error",
) -> Plan:
    """Settle what a run does.

    Args:
        structure: What the tensors are in the model.
        tensors: What the source holds.
        recipe: What to quantize.
        model_type: Selects the spec.
        numerics: Arithmetic of scales and quotients.
        on_bad_shape: "error", or "skip" to leave a matrix that its format cannot hold.

    Raises:
        RecipeError: An unknown format, a pattern that selects nothing, or nothing to quantize.
        ShapeError: A matrix that the format cannot hold.
        SpecError: The model's experts cannot be understood without a spec.
    """
    for name in recipe.formats:
        get_format(name)
    cache = CACHE_FORMATS[recipe.kv_cache] if recipe.kv_cache else None
    spec = get_spec(model_type)
    ptq = ptq_facts(spec)
    names = structure.names
    modules = (name.rpartition(".")[0] for name in tensors)
    found = find_candidates(structure, tensors, spec)
    candidates = apply_recipe(found, recipe, modules, structure)
    candidates, notes = regroup(candidates, recipe)
    candidates = _whole_groups(check_shapes(candidates, on_bad_shape, numerics), ptq)
    if all(c.skip for c in candidates) and (recipe.formats or cache is None):
        reasons = sorted({str(c.skip) for c in candidates})
        raise RecipeError(
            f"the recipe {recipe.name!r} leaves nothing to quantize (matrices: {len(candidates)}, "
            f"left out as: {'; '.join(reasons[:5])}); change its patterns or its format"
        )
    unit_of = {entry: unit.name for unit in structure.units for entry in unit.entries}
    readers = find_readers(candidates, structure, tensors, spec, recipe, numerics)
    matrices = _matrices(candidates, names, unit_of, numerics, ptq, readers, tensors, recipe)
    plan = Plan(
        recipe=recipe,
        numerics=numerics,
        names=names,
        spec=spec,
        matrices=matrices,
        copies=_copies(candidates, matrices, tensors, _widened(ptq, numerics)),
        kv_cache=_kv_cache(structure, tensors, unit_of, ptq, cache),
        excluded={c.name: c.skip for c in candidates if c.skip},
        unquantized=[],
        units=list(structure.units),
        folds=readers.folds,
        rows=readers.rows,
        notes=[*notes, *readers.notes],
    )
    plan.unquantized = _unquantized_modules(plan, structure)
    plan.notes += check_formats(recipe.algorithm, numerics, plan.formats)
    stacks = {m.name: FORMATS[m.format] for m in matrices if m.stacked and m.input_major}
    check_stacks(recipe.algorithm, numerics, stacks)
    if spec is None:
        plan.fallbacks.append(
            f"no spec for model_type {model_type!r}: linear layers and experts were found by "
            "structure alone (`modelopt-lite specs new CKPT` writes a first draft of one)"
        )
    return plan


def _kv_cache(
    structure: Structure,
    tensors: Mapping[str, TensorShape],
    unit_of: Mapping[str, str],
    ptq: PTQSpec,
    cache: CacheFormat | None,
) -> list[KVCacheScale]:
    if cache is None or not cache.scaled:
        return []
    assert structure.model is not None, "scales of a cache need a model"
    return find_caches(structure.model, structure.names, tensors, unit_of, ptq, cache)


def _whole_groups(candidates: list[Candidate], ptq: PTQSpec) -> list[Candidate]:
    """Leave out all of a group that engines treat as one layer where any member is left out.

    Raises:
        RecipeError: The recipe gives members of such a group different formats.
    """
    left_out: dict[str, str] = {}
    first: dict[str, Candidate] = {}
    keys: list[str | None] = []
    for c in candidates:
        key = c.experts if c.experts and not c.stacked else fused_group(c.name, c.role, ptq)
        keys.append(key)
        if key is None:
            continue
        if c.skip is not None:
            left_out.setdefault(key, c.name)
        elif (other := first.setdefault(key, c)).format != c.format:
            raise RecipeError(
                f"the recipe gives {other.name!r} the format {other.format!r} and {c.name!r} "
                f"{c.format!r}, and engines join the two into one layer; name both in one override"
            )
    return [
        replace(c, skip=f"engines fuse it with {left_out[key]}, which is left out")
        if c.skip is None and key in left_out
        else c
        for c, key in zip(candidates, keys, strict=True)
    ]


def _matrices(
    candidates: Iterable[Candidate],
    names: NameMap,
    unit_of: Mapping[str, str],
    numerics: Numerics,
    ptq: PTQSpec,
    readers: Readers,
    tensors: Mapping[str, TensorShape],
    recipe: Recipe,
) -> list[Matrix]:
    """Settle each matrix."""
    # Model Optimizer's smoothing gives each expert's inputs a scale of their own, and its gate and
    # up projections share all scales of weights.
    peer = numerics == "modelopt" and recipe.algorithm.smooths
    rank = recipe.algorithm.rank
    matrices = []
    first: dict[tuple[str, int | None], Site] = {}
    for c in candidates:
        if c.skip is not None:
            continue
        fmt = FORMATS[c.format]
        place = names.place(c.source)
        if place is None:
            raise SpecError(
                f"{c.source!r} is not a parameter of the model; exclude it in the recipe"
            )
        entry, region = place
        expert = c.expert if region == () and c.region else None
        if region and isinstance(region[0], int):
            expert = region[0]
        fused = fused_group(c.name, c.role, ptq)
        # The peer leaves dense siblings their own FP8 scales; engines then re-quantize them.
        apart = numerics == "modelopt" and fmt.name == "fp8" and c.expert is None
        shares = fmt.shares_amax(c.shape, numerics) or (peer and c.expert is not None)
        reads = input_group(c, fused)
        kept = tensors[c.source].dtype if c.name in readers.kept else None
        turned = c.stacked and c.input_major
        matrices.append(
            Matrix(
                name=c.name,
                source=c.source,
                region=c.region,
                shape=c.shape,
                input_major=c.input_major,
                format=fmt.name,
                parts=matrix_parts(fmt.name, c.shape, turned, numerics, kept, rank),
                stacked=c.stacked,
                weight_group=fused if fused and shares and not apart else c.name,
                input_group=((fused or c.name) if peer else reads) if fmt.static_input else None,
                entry=entry,
                expert=expert,
                experts=c.experts,
                unit=unit_of[entry],
                reads=readers.group[c.name],
                seen_at=first.setdefault((reads, c.expert), Site(entry, expert)),
            )
        )
    return matrices


def _widened(ptq: PTQSpec, numerics: Numerics) -> frozenset[str]:
    """Leaf names that the peer writes in the float32 it loads them to, whatever the disk holds."""
    return frozenset(ptq.keep_dtype_names if numerics == "modelopt" else ())


def _copies(
    candidates: Iterable[Candidate],
    matrices: Iterable[Matrix],
    tensors: Mapping[str, TensorShape],
    widened: frozenset[str],
) -> list[Copy]:
    """What stays: whole tensors, and matrices left out of a tensor that others are taken from."""
    taken = {m.source for m in matrices}
    copies = []
    for name, info in tensors.items():
        if name not in taken:
            wide = name.rpartition(".")[2] in widened and info.dtype.is_floating_point
            dtype = torch.float32 if wide else info.dtype
            copies.append(Copy(name, (), Output(name, dtype, info.shape)))
    for c in candidates:
        if c.skip is not None and c.source in taken:
            dtype = tensors[c.source].dtype
            copies.append(Copy(c.source, c.region, Output(f"{c.name}.weight", dtype, c.shape)))
    return copies


def _unquantized_modules(plan: Plan, structure: Structure) -> list[str]:
    """Modules with a weight that a reader could take for a linear layer's, and that is left."""
    modules = set(structure.tied_heads)
    for copy in plan.copies:
        name, _, leaf = copy.output.name.rpartition(".")
        if len(copy.output.shape) < 2 or not copy.output.dtype.is_floating_point:
            continue
        stack = len(copy.output.shape) == 3 and "bias" not in leaf and "expert" in name
        if leaf == "weight" or stack:
            modules.add(name)
    return sorted(modules - {m.name for m in plan.matrices}, key=natural_key)
