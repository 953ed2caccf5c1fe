"""Say of a plan what it becomes in a dialect, or by which rule it cannot be kept there."""

from __future__ import annotations

from dataclasses import replace

from modelopt_lite.cache_scales import KVCacheScale
from modelopt_lite.dialects.base import Contents, Dialect
from modelopt_lite.dialects.engines import loading
from modelopt_lite.errors import RecipeError
from modelopt_lite.formats.cache import CACHE_FORMATS
from modelopt_lite.formats.linear import FORMATS
from modelopt_lite.plan import Matrix, Plan
from modelopt_lite.words import counted

_WITH = {
    "": "",
    "scale": " with a pre_quant_scale beside a matrix",
    "factors": " with low-rank factors beside a matrix",
}


def translate(plan: Plan, dialect: Dialect) -> Plan:
    """Return a plan of the modelopt dialect as one of another.

    The two share what does not depend on the dialect: units, names, copies.

    Raises:
        RecipeError: The dialect cannot keep a matrix or the cache; the rule is named.
    """
    if plan.recipe.kv_cache is not None:
        cache = CACHE_FORMATS[plan.recipe.kv_cache]
        if problem := dialect.cache_problem(cache):
            raise RecipeError(f"the dialect {dialect.name!r} cannot keep the KV cache: {problem}")
    _check_matrices(plan, dialect)
    translated = replace(
        plan,
        matrices=[_translated(matrix, dialect) for matrix in plan.matrices],
        kv_cache=[_translated_scales(scales, dialect) for scales in plan.kv_cache],
        notes=list(plan.notes),
        fallbacks=list(plan.fallbacks),
        dialect=dialect,
    )
    translated.notes += [
        f"no engine is known to load the format {fmt.name!r}{_WITH[plan.beside]} in the dialect "
        f"{dialect.name!r} (docs/clients.md); choose another to serve the export"
        for fmt in plan.formats
        if not loading(dialect.name, fmt, plan.beside)
    ]
    return translated


def contents(plan: Plan) -> Contents:
    """Return what the config files of a plan's export describe."""
    cache = plan.recipe.kv_cache
    return Contents(
        formats={m.name: FORMATS[m.format] for m in plan.matrices},
        unquantized=plan.unquantized,
        names_in_model=_names_in_model(plan),
        cache=CACHE_FORMATS[cache] if cache is not None else None,
        numerics=plan.numerics,
        pre_quant_scale=plan.recipe.algorithm.smooths
        and (plan.keeps_scales or plan.numerics == "modelopt"),
        rank=plan.recipe.algorithm.rank,
    )


def matrix_problem(matrix: Matrix, dialect: Dialect) -> str | None:
    """Return the rule by which a dialect cannot keep a matrix as it is planned, None if it can."""
    fmt = FORMATS[matrix.format]
    if problem := dialect.problem(fmt, matrix.shape):
        return problem
    if matrix.keeps_factors:
        return dialect.factors_problem(fmt)
    if matrix.keeps_scale and (problem := dialect.pre_quant_scale_problem(fmt)):
        return (
            f"{problem}, and the model has no norm or linear before this matrix that takes them up"
        )
    return None


def _check_matrices(plan: Plan, dialect: Dialect) -> None:
    problems = {}
    for matrix in plan.matrices:
        if problem := matrix_problem(matrix, dialect):
            problems[matrix.name] = problem
    if problems:
        name, problem = next(iter(problems.items()))
        raise RecipeError(
            f"the dialect {dialect.name!r} cannot keep {name!r} "
            f"({counted(len(problems), 'matrix', 'matrices')} in all): {problem}; choose another "
            "format or dialect, or exclude it in the recipe"
        )


def _translated(matrix: Matrix, dialect: Dialect) -> Matrix:
    parts = dialect.tensors(FORMATS[matrix.format], matrix.parts, matrix.shape)
    return matrix if parts == matrix.parts else replace(matrix, parts=parts)


def _translated_scales(scales: KVCacheScale, dialect: Dialect) -> KVCacheScale:
    projections = (o.name.rpartition(".")[0] for o in (scales.key, scales.value))
    key, value = dialect.cache_scales(*projections)
    shape, dtype = dialect.scalar_shape(), dialect.scale_dtype
    return replace(
        scales,
        key=replace(scales.key, name=key, dtype=dtype, shape=shape),
        value=replace(scales.value, name=value, dtype=dtype, shape=shape),
    )


def _names_in_model(plan: Plan) -> dict[str, str]:
    """Modules on disk that have another name in the model; experts of a stack have none."""
    found = {}
    for module in (*plan.unquantized, *(m.name for m in plan.matrices)):
        place = plan.names.place(f"{module}.weight")
        if place is not None and not place[1]:
            name = place[0].rpartition(".")[0]
            if name != module:
                found[module] = name
    return found
