"""Apply a recipe to what could be quantized: patterns, formats, sizes of groups."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import accumulate

from torch import nn

from modelopt_lite.errors import InternalError, OffloadConfigError, RecipeError
from modelopt_lite.formats.linear import FORMATS
from modelopt_lite.offload.patterns import Pattern, parse_pattern, selects
from modelopt_lite.recipes import NO_FORMAT, Recipe
from modelopt_lite.select import Candidate
from modelopt_lite.structure import Structure
from modelopt_lite.words import counted, near


class Selection:
    """Tells which modules a pattern selects: by name, or by the class of it or of one around it.

    Args:
        structure: What the tensors are in the model; names alone do without.
    """

    def __init__(self, structure: Structure | None) -> None:
        self._structure = structure
        self._classes: dict[str, tuple[type, ...]] = {}
        self._patterns: dict[str, Pattern] = {}

    def selects(self, pattern: str, name: str, source: str | None = None) -> bool:
        """Return whether a pattern selects a module on disk, given its tensor where that differs.

        Raises:
            RecipeError: The pattern is malformed.
        """
        if pattern not in self._patterns:
            try:
                self._patterns[pattern] = parse_pattern(pattern)
            except OffloadConfigError as error:
                raise RecipeError(f"a pattern of the recipe: {error}") from error
        parsed = self._patterns[pattern]
        if parsed.kind == "name":
            return selects(parsed.body, name)
        return any(map(parsed.matches_class, self._classes_of(source or f"{name}.weight")))

    def class_names(self) -> list[str]:
        """Return the names of the model's classes, each once."""
        model = self._model()
        return list(dict.fromkeys(type(module).__name__ for module in model.modules()))

    def _model(self) -> nn.Module:
        if self._structure is None or self._structure.model is None:
            raise InternalError("patterns of classes need a model")
        return self._structure.model

    def _classes_of(self, source: str) -> tuple[type, ...]:
        """Return the classes of the module that holds a tensor, and of those around it."""
        model = self._model()
        assert self._structure is not None
        group = self._structure.names.by_source.get(source)
        if group is None:
            return ()
        path = group.targets[0].rpartition(".")[0]
        if path not in self._classes:
            paths = list(accumulate(path.split("."), "{}.{}".format)) if path else []
            around = [model, *map(model.get_submodule, paths)]
            self._classes[path] = tuple(map(type, around))
        return self._classes[path]


def apply_recipe(
    found: list[Candidate],
    recipe: Recipe,
    others: Iterable[str] = (),
    structure: Structure | None = None,
) -> list[Candidate]:
    """Set the formats that the recipe gives, and its reasons where it gives none.

    Args:
        found: What could be quantized.
        recipe: What to quantize.
        others: Further names that a pattern may exclude: whether a router is a linear layer
            depends on the release of transformers.
        structure: What the candidates are in the model; patterns of classes need it.

    Raises:
        RecipeError: A pattern selects nothing, or nothing is left to quantize.
    """
    selection = Selection(structure)
    names: list[tuple[str, str | None]] = [(c.name, c.source) for c in found]
    more = [*names, *((name, None) for name in others)]
    _check_patterns("include", recipe.include, names, recipe, selection)
    _check_patterns("exclude", recipe.exclude, more, recipe, selection)
    for override in recipe.overrides:
        _check_patterns("override", override.modules, more, recipe, selection)
    _check_includes(found, recipe, selection)
    chosen = []
    for c in found:
        name, reason = _format_of(c, recipe, selection)
        skip = c.skip or reason
        chosen.append(replace(c, skip=skip, format="" if skip else name))
    if recipe.formats and not any(c.skip is None for c in chosen):
        reasons = sorted({str(c.skip) for c in chosen}) or ["the model has no linear layers"]
        raise RecipeError(
            f"the recipe {recipe.name!r} quantizes nothing of this model "
            f"({counted(len(chosen), 'matrix', 'matrices')}, left out as: "
            f"{'; '.join(reasons[:5])}); change its patterns"
        )
    return chosen


def _format_of(c: Candidate, recipe: Recipe, selection: Selection) -> tuple[str, str | None]:
    """Return the format that a recipe gives a matrix, or why it gives none."""

    def selected(patterns: Iterable[str]) -> str | None:
        return next((p for p in patterns if selection.selects(p, c.name, c.source)), None)

    if (pattern := selected(recipe.exclude)) is not None:
        return "", f"excluded by the pattern {pattern!r}"
    included = not recipe.include or selected(recipe.include) is not None
    name, left = recipe.format if included else NO_FORMAT, f"not in the recipe {recipe.name}"
    for override in recipe.overrides:
        if selected(override.modules) is not None:
            name, left = override.format, f"left out by an override of the recipe {recipe.name}"
    return (name, None) if name != NO_FORMAT else ("", left)


def regroup(candidates: list[Candidate], recipe: Recipe) -> tuple[list[Candidate], list[str]]:
    """Give INT4 formats the groups that the recipe asks for.

    Where it gives several sizes, all matrices have the first that divides the inputs of each; where
    none does, the first, whose matrices `check_shapes` then names.

    Returns:
        The matrices, and notes on what was taken instead of the first.

    Raises:
        RecipeError: No format of the recipe has groups of another size.
    """
    if not recipe.group_size:
        return candidates, []
    grouped = [c for c in candidates if c.skip is None and FORMATS[c.format].codec.any_block]
    if not grouped:
        fixed = ", ".join(recipe.formats) or "none"
        raise RecipeError(
            f"the recipe {recipe.name!r} asks for group_size {list(recipe.group_size)}, and no "
            f"matrix has a format whose groups may have another size (formats: {fixed}); leave "
            "group_size out, or take int4_weight_only or w4a8_awq"
        )
    widths = {c.width: c for c in reversed(grouped)}
    taken = next((s for s in recipe.group_size if not any(w % s for w in widths)), None)
    notes = []
    if taken not in (None, recipe.group_size[0]):
        width, c = next((w, c) for w, c in widths.items() if w % recipe.group_size[0])
        notes.append(
            f"groups of {taken} instead of {recipe.group_size[0]}, which does not divide the "
            f"{width} inputs of {c.name}"
        )
    size = taken or recipe.group_size[0]
    names = {c.name for c in grouped}
    return [
        replace(c, format=FORMATS[c.format].with_group_size(size).name) if c.name in names else c
        for c in candidates
    ], notes


def _check_includes(found: list[Candidate], recipe: Recipe, selection: Selection) -> None:
    """Refuse an include that would be without effect: all that it selects stays as it is."""
    for pattern in recipe.include:
        hit = [c for c in found if selection.selects(pattern, c.name, c.source)]
        if hit and all(c.skip for c in hit):
            raise RecipeError(
                f"the include pattern {pattern!r} of recipe {recipe.name!r} selects only what is "
                f"never quantized here: {hit[0].name} ({hit[0].skip}); leave it out"
            )


def _check_patterns(
    kind: str,
    patterns: tuple[str, ...],
    names: list[tuple[str, str | None]],
    recipe: Recipe,
    selection: Selection,
) -> None:
    """A preset's lists serve every architecture: there, a pattern may select nothing."""
    from modelopt_lite.recipes import preset_names

    hits = {p: any(selection.selects(p, *name) for name in names) for p in patterns}
    if recipe.name in preset_names():
        return
    for pattern, hit in hits.items():
        if hit:
            continue
        where = f"the {kind} pattern {pattern!r} of recipe {recipe.name!r} matches no linear layer"
        if pattern.startswith("class:"):
            classes = selection.class_names()
            hint = near(pattern.removeprefix("class:").strip(), classes)
            raise RecipeError(f"{where}{hint}; the model has the classes {', '.join(classes)}")
        example = names[0][0] if names else "(none)"
        raise RecipeError(
            f"{where}; a name looks like {example!r}, and a lone * spans one or more parts"
        )
