"""Write recipes as files that people read, and that can be used again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from modelopt_lite.errors import OutputError
from modelopt_lite.recipes import Recipe


def recipe_text(recipe: Recipe) -> str:
    """Return a recipe with settled formats as YAML; `load_recipe` reads the same from it."""
    import yaml

    data: dict[str, Any] = {"name": recipe.name}
    if recipe.description:
        data["description"] = recipe.description
    data["weights"] = recipe.weights
    if recipe.inputs is not None:
        data["inputs"] = recipe.inputs
    if recipe.group_size:
        data["group_size"] = list(recipe.group_size)
    if recipe.kv_cache is not None:
        data["kv_cache"] = recipe.kv_cache
    if recipe.algorithm.method != "max":
        data["algorithm"] = {"method": recipe.algorithm.method, **recipe.algorithm.options}
    for key in ("include", "exclude"):
        if patterns := getattr(recipe, key):
            data[key] = list(patterns)
    if recipe.overrides:
        data["overrides"] = [
            {
                "weights": override.weights,
                **({} if override.inputs is None else {"inputs": override.inputs}),
                "modules": list(override.modules),
            }
            for override in recipe.overrides
        ]
    return str(yaml.safe_dump(data, sort_keys=False, allow_unicode=True, width=100))


def write_recipe(recipe: Recipe, path: Path) -> None:
    """Write a recipe to a file.

    Raises:
        OutputError: It cannot be written.
    """
    try:
        path.write_text(recipe_text(recipe), encoding="utf-8")
    except OSError as error:
        raise OutputError(f"the recipe cannot be written to {path}: {error.strerror}") from error
