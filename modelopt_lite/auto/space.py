"""What a search chooses between: groups of matrices that engines fuse, and the formats of each."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from modelopt_lite.apply import apply_recipe
from modelopt_lite.auto.choose import Option
from modelopt_lite.checkpoint.dequant import Source
from modelopt_lite.dialects.base import Dialect
from modelopt_lite.errors import RecipeError, ShapeError
from modelopt_lite.export.translate import matrix_problem
from modelopt_lite.formats.base import Numerics
from modelopt_lite.formats.linear import get_format
from modelopt_lite.job import tensor_shapes
from modelopt_lite.models import get_spec
from modelopt_lite.models.specs import ptq_facts
from modelopt_lite.plan import Matrix, Plan, make_plan
from modelopt_lite.readers import one_choice
from modelopt_lite.recipes import NO_FORMAT, Override, Recipe
from modelopt_lite.recipes.algorithms import AlgorithmChoice
from modelopt_lite.select import Candidate, find_candidates
from modelopt_lite.structure import Structure, TensorShape
from modelopt_lite.words import counted

Scores = dict[str, dict[str, float]]
"""Group -> format -> score."""


@dataclass(frozen=True, slots=True)
class Group:
    """Matrices that get one format.

    Attributes:
        name: What engines make of them, or the matrix's name.
        unit: The unit of the model that holds them.
        modules: What a recipe calls them.
        members: Names of the matrices.
        weights: How many values they have.
        bytes: Format -> bytes on disk, scales included, of those that the group can have.
    """

    name: str
    unit: str
    modules: tuple[str, ...]
    members: tuple[str, ...]
    weights: int
    bytes: Mapping[str, int]

    def options(self, scores: Mapping[str, float]) -> list[Option]:
        """Return the formats with their scores; a format that changes nothing scores 0."""
        return [Option(name, size, scores.get(name, 0.0)) for name, size in self.bytes.items()]


@dataclass(frozen=True, slots=True)
class Space:
    """All groups, and what each format makes of the model.

    Attributes:
        recipe: The recipe whose formats are searched.
        groups: Those with a choice, in the order of the model.
        settled: Those without: one format is possible, or nothing can be found out about them.
        plans: Format -> the plan that gives it to all matrices.
        notes: What a user should know.
    """

    recipe: Recipe
    groups: list[Group]
    settled: list[Group]
    plans: dict[str, Plan]
    notes: list[str] = field(default_factory=list)

    @property
    def weights(self) -> int:
        """Values of all groups."""
        return sum(group.weights for group in (*self.groups, *self.settled))

    def bits(self, formats: Mapping[str, str]) -> float:
        """Return the bits a weight under a choice, group -> format."""
        settled = sum(min(group.bytes.values()) for group in self.settled)
        chosen = sum(group.bytes[formats[group.name]] for group in self.groups)
        return 8 * (settled + chosen) / self.weights

    def group_of(self) -> dict[str, str]:
        """Return the group of each matrix, among those with a choice."""
        return {member: group.name for group in self.groups for member in group.members}

    def recipe_for(self, formats: Mapping[str, str], name: str, description: str) -> Recipe:
        """Return the recipe that makes a choice: the format of most groups, and overrides."""
        modules: dict[str, list[str]] = {}
        for group in self.groups:
            modules.setdefault(formats[group.name], []).extend(group.modules)
        for group in self.settled:
            modules.setdefault(next(iter(group.bytes)), []).extend(group.modules)
        quantizing = {f: names for f, names in modules.items() if f != NO_FORMAT}
        if not quantizing:
            raise RecipeError(
                f"{self.recipe.name}: no matrix is quantized at so many bits a weight; ask for "
                "fewer effective_bits"
            )
        most = max(quantizing, key=lambda f: len(quantizing[f]))
        others = (f for f in self.recipe_formats(modules) if f != most)
        return replace(
            self.recipe,
            name=name,
            weights=most,
            overrides=tuple(Override(modules=tuple(modules[f]), weights=f) for f in others),
            auto_quantize=None,
            description=description,
        )

    def recipe_formats(self, among: Mapping[str, object]) -> list[str]:
        """Return formats in the order in which the recipe names them."""
        assert self.recipe.auto_quantize is not None
        known = [*self.recipe.auto_quantize.formats, NO_FORMAT]
        return [name for name in dict.fromkeys(known) if name in among]


def uniform(recipe: Recipe, fmt: str) -> Recipe:
    """Return the recipe that gives all matrices of another one a format, by largest magnitudes.

    Raises:
        RecipeError: There is no such format.
    """
    return replace(
        recipe,
        weights=fmt,
        kv_cache=None,
        overrides=(),
        auto_quantize=None,
        algorithm=AlgorithmChoice(),
        group_size=recipe.group_size if get_format(fmt).codec.any_block else (),
    )


def find_space(
    structure: Structure,
    source: Source,
    recipe: Recipe,
    *,
    model_type: str,
    numerics: Numerics,
    on_bad_shape: str,
    dialects: Sequence[Dialect],
) -> Space:
    """Find the groups of a model, and the formats that each can have.

    Args:
        structure: The model's.
        source: Its checkpoint.
        recipe: Has ``auto_quantize``.
        model_type: Selects the spec.
        numerics: Arithmetic of scales and quotients.
        on_bad_shape: "skip" leaves groups as they are that no format can hold.
        dialects: Those of the export. A format is no choice where one has no room for what the
            recipe's algorithm would put beside it.

    Raises:
        RecipeError: Unknown formats, or no group with a choice.
        ShapeError: A group that no format can hold.
    """
    auto = recipe.auto_quantize
    assert auto is not None
    shapes = tensor_shapes(source)
    planned = partial(
        make_plan,
        structure,
        shapes,
        model_type=model_type,
        numerics=numerics,
        on_bad_shape="skip",
    )
    formats = [fmt for fmt in auto.formats if fmt != NO_FORMAT]
    plans = {fmt: planned(uniform(recipe, fmt)) for fmt in formats}
    members = _members(structure, shapes, uniform(recipe, next(iter(plans))), model_type)
    layers = {unit.name for unit in structure.units if unit.is_layer}
    unit_of = {entry: unit.name for unit in structure.units for entry in unit.entries}
    space = Space(recipe, [], [], plans)
    held = {fmt: {m.name: m for m in plan.matrices} for fmt, plan in plans.items()}
    for fmt in formats if recipe.algorithm.smooths else ():
        smoothed = planned(replace(uniform(recipe, fmt), algorithm=recipe.algorithm)).matrices
        found = {m.name: p for d in dialects for m in smoothed if (p := matrix_problem(m, d))}
        held[fmt] = {name: m for name, m in held[fmt].items() if name not in found}
        if found:
            which = f"{next(iter(found))} ({counted(len(found), 'matrix', 'matrices')} in all)"
            space.notes.append(f"{fmt} is no choice for {which}: {next(iter(found.values()))}")
    for name, candidates in members.items():
        place = structure.names.place(candidates[0].source)
        group = _group(name, candidates, held, shapes, unit_of[place[0]] if place else "")
        if NO_FORMAT not in auto.formats and len(group.bytes) > 1:
            sizes = {fmt: size for fmt, size in group.bytes.items() if fmt != NO_FORMAT}
            group = replace(group, bytes=sizes)
        elif NO_FORMAT not in auto.formats and on_bad_shape == "error":
            raise ShapeError(
                f"no format of {', '.join(plans)} can hold all of {name} "
                f"({list(candidates[0].shape)}); add one that can, or none, exclude it, or leave "
                'it as it is with on_bad_shape="skip" (--on-bad-shape skip)'
            )
        if group.unit not in layers:
            group = replace(group, bytes={NO_FORMAT: _source_bytes(candidates, shapes)})
            space.notes.append(f"{name} lies in no decoder layer, so it is left as it is")
        (space.groups if len(group.bytes) > 1 else space.settled).append(group)
    if not space.groups:
        raise RecipeError(
            f"{recipe.name}: no group of matrices has a choice of formats "
            f"({counted(len(space.settled), 'group')} in all); name formats that the model's "
            "shapes allow"
        )
    return space


def _members(
    structure: Structure, shapes: Mapping[str, TensorShape], recipe: Recipe, model_type: str
) -> dict[str, list[Candidate]]:
    """Return the matrices that the recipe quantizes, by the group that engines fuse."""
    spec = get_spec(model_type)
    modules = (name.rpartition(".")[0] for name in shapes)
    found = apply_recipe(find_candidates(structure, shapes, spec), recipe, modules, structure)
    keys = [one_choice(c, ptq_facts(spec)) for c in found]
    broken = {key for key, c in zip(keys, found, strict=True) if c.skip is not None}
    groups: dict[str, list[Candidate]] = {}
    for key, c in zip(keys, found, strict=True):
        if c.skip is None and (key not in broken or c.stacked):  # a stack goes without its sibling
            groups.setdefault(c.name if key in broken else key, []).append(c)
    return groups


def _group(
    name: str,
    candidates: Sequence[Candidate],
    held: Mapping[str, Mapping[str, Matrix]],
    shapes: Mapping[str, TensorShape],
    unit: str,
) -> Group:
    names = tuple(c.name for c in candidates)
    sizes = {
        fmt: sum(map(_bytes, (matrices[n] for n in names)))
        for fmt, matrices in held.items()
        if all(n in matrices for n in names)
    }
    container = candidates[0].experts
    return Group(
        name=name,
        unit=unit,
        modules=(container,) if container == name else names,
        members=names,
        weights=sum(math.prod(c.shape) for c in candidates),
        bytes={**sizes, NO_FORMAT: _source_bytes(candidates, shapes)},
    )


def _source_bytes(candidates: Sequence[Candidate], shapes: Mapping[str, TensorShape]) -> int:
    return sum(math.prod(c.shape) * shapes[c.source].dtype.itemsize for c in candidates)


def _bytes(matrix: Matrix) -> int:
    return sum(math.prod(part.shape) * part.dtype.itemsize for part in matrix.parts)
