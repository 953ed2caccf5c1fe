"""Recipes: what is quantized, and to which format. The presets are the YAML files beside this one.

A recipe names a weight format, the modules it applies to, other formats for some of them, and the
format of the KV cache. Patterns
select modules by their name on disk, with everything below them: ``*`` alone stands for one or more
parts of the dotted name, and within a part for any characters. ``class:`` before a pattern selects
by the class of a module in the installed transformers, again with everything below.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from modelopt_lite.errors import OffloadConfigError, RecipeError
from modelopt_lite.formats.cache import CACHE_FORMATS
from modelopt_lite.formats.groups import GROUP_MULTIPLE, fits_groups
from modelopt_lite.paths import asked_path
from modelopt_lite.recipes.algorithms import AlgorithmChoice, parse_algorithm
from modelopt_lite.recipes.auto import AutoQuantize, parse_auto
from modelopt_lite.words import near

_PRESETS = Path(__file__).parent
KV_FORMATS = tuple(CACHE_FORMATS)
NO_FORMAT = "none"
AUTO_FORMAT = "auto"
"""What stands for ``weights`` where a search chooses the formats."""
ALIASES = {
    "fp8_pc_pt": "fp8_per_channel_per_token",
    "fp8_pb_wo": "fp8_2d_blockwise_weight_only",
    "int8_sq": "int8_smoothquant",
    "int8_wo": "int8_weight_only",
    "nvfp4_awq": "nvfp4_awq_lite",
    "nvfp4_mse": "nvfp4_w4a4_weight_mse_fp8_sweep",
    "w4a8_awq": "w4a8_awq_beta",
}
"""Older, short names of presets."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Override:
    """Another weight format for some modules.

    Attributes:
        modules: Patterns of the modules.
        weights: Name of a format, or ``"none"`` to leave them as they are.
        inputs: How inputs are rounded, where not as that format has it; see ``Recipe.inputs``.
    """

    modules: tuple[str, ...]
    weights: str
    inputs: str | None = None

    @property
    def format(self) -> str:
        """The format of weights and inputs together, or ``"none"``."""
        return _format_of(self.weights, self.inputs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """What to quantize and how.

    Attributes:
        name: Shown in reports and in the default name of the export's folder.
        weights: Name of a format, which also says how inputs are quantized; ``"none"`` for none.
        inputs: How inputs are rounded, a key of ``INPUTS``, where not as the format of the weights
            has it; there must be a format of both.
        kv_cache: Format of the key and value cache, or None to leave it.
        algorithm: How scales are chosen; in files a name, or ``method`` and its options.
        include: Patterns of modules to quantize; empty: every linear layer and expert that the
            model's spec does not leave out.
        exclude: Patterns of modules to leave as they are, whatever else names them.
        overrides: Other formats for some modules, included or not; a later one wins.
        group_size: Sizes of the groups of INT4 formats; the first that divides the inputs of all
            its matrices is taken. Empty: 128.
        auto_quantize: What a search chooses the formats from, in the place of ``weights`` and
            ``overrides``; None in a recipe whose formats are settled.
    """

    name: str
    weights: str
    inputs: str | None = None
    kv_cache: str | None = None
    algorithm: AlgorithmChoice = field(default_factory=AlgorithmChoice)
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    overrides: tuple[Override, ...] = ()
    group_size: tuple[int, ...] = ()
    auto_quantize: AutoQuantize | None = None
    description: str = field(default="", compare=False)

    @property
    def format(self) -> str:
        """The format of weights and inputs together, or ``"none"``."""
        return _format_of(self.weights, self.inputs)

    @property
    def input_format(self) -> str:
        """How inputs are rounded, a key of ``INPUTS``, whether it was said or follows."""
        from modelopt_lite.formats.inputs import INPUTS
        from modelopt_lite.formats.linear import get_format

        rounding = get_format(self.format).inputs if self.format != NO_FORMAT else INPUTS["none"]
        return next(name for name, inputs in INPUTS.items() if inputs == rounding)

    @property
    def selects_by_class(self) -> bool:
        """Whether some pattern asks for the classes of modules, which only a model has."""
        named = (pattern for override in self.overrides for pattern in override.modules)
        every = (*self.include, *self.exclude, *named)
        return any(pattern.lstrip().startswith("class:") for pattern in every)

    @property
    def formats(self) -> tuple[str, ...]:
        """Names of the weight formats that it asks for, each once."""
        if self.auto_quantize is not None:
            return tuple(name for name in self.auto_quantize.formats if name != NO_FORMAT)
        named = (self.format, *(override.format for override in self.overrides))
        return tuple(dict.fromkeys(name for name in named if name != NO_FORMAT))


def _format_of(weights: str, inputs: str | None) -> str:
    if inputs is None or weights == NO_FORMAT:
        return weights
    from modelopt_lite.formats.linear import get_format, with_inputs  # they need torch

    return with_inputs(get_format(weights), inputs).name


def preset_names() -> list[str]:
    """Return the names of the presets, sorted."""
    return sorted(path.stem for path in _PRESETS.glob("*.yaml"))


def load_recipe(recipe: str | Path | Recipe, *, kv_cache: str | None = None) -> Recipe:
    """Return a recipe: a preset by name, one from a YAML file, or the given one.

    Args:
        recipe: Name of a preset, its short name (``ALIASES``), path of a ``.yaml`` file, or a
            recipe.
        kv_cache: Replaces the recipe's own where not None; ``"none"`` removes it.

    Raises:
        RecipeError: No such preset or file, or a key or value that means nothing.
    """
    if not isinstance(recipe, Recipe):
        if Path(recipe).suffix in {".yaml", ".yml"}:
            recipe = _read(asked_path(recipe, RecipeError))
        else:
            recipe = _read(_PRESETS / f"{_preset(str(recipe))}.yaml")
    if kv_cache is not None:
        recipe = replace(recipe, kv_cache=None if kv_cache == "none" else kv_cache)
    if recipe.kv_cache is not None and recipe.kv_cache not in KV_FORMATS:
        raise RecipeError(
            f"unknown KV cache format {recipe.kv_cache!r}{near(recipe.kv_cache, KV_FORMATS)}; "
            f"known: {', '.join(KV_FORMATS)}"
        )
    return recipe


def _preset(name: str) -> str:
    name, names = ALIASES.get(name, name), preset_names()
    if name not in names:
        hint = near(name, (*names, *ALIASES))
        raise RecipeError(
            f"unknown recipe {name!r}{hint}; presets: {', '.join(names)}; "
            "a recipe of your own is a .yaml file"
        )
    return name


def _read(path: Path) -> Recipe:
    import yaml

    from modelopt_lite.yamls import load_yaml

    try:
        data = load_yaml(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise RecipeError(f"cannot read the recipe {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise RecipeError(f"the recipe {path} is no valid YAML: {error}") from error
    if not isinstance(data, dict):
        raise RecipeError(f"the recipe {path} must be a mapping of keys, got {type(data).__name__}")
    return parse_recipe({"name": path.stem, **data}, where=str(path))


def parse_recipe(data: dict[str, Any], *, where: str) -> Recipe:
    """Check a mapping's keys and types and make a recipe of it; ``where`` names it in errors."""
    _check_keys(data, Recipe, where)
    auto = None
    if data.get("auto_quantize") is not None:
        auto = parse_auto(data["auto_quantize"], where=where)
        if data.get("weights", AUTO_FORMAT) != AUTO_FORMAT or data.get("overrides"):
            raise RecipeError(
                f"{where}: auto_quantize chooses all formats; leave weights and overrides out, or "
                "exclude modules"
            )
        data = {**data, "weights": AUTO_FORMAT}
    if not isinstance(data.get("weights"), str):
        raise RecipeError(
            f'{where}: weights must name a format, or be "none", got {data.get("weights")!r}'
        )
    made: dict[str, Any] = {key: _patterns(data, key, where) for key in ("include", "exclude")}
    for key in ("name", "inputs", "kv_cache", "description"):
        if not isinstance(data.get(key, ""), str | None):
            raise RecipeError(f"{where}: {key} must be text, got {data[key]!r}")
    if not data.get("name") or "/" in data["name"]:  # it ends the name of the export's folder
        raise RecipeError(
            f"{where}: name must be text that is not empty and has no /, got {data.get('name')!r}"
        )
    made["algorithm"] = parse_algorithm(data.get("algorithm", "max"), where=where)
    overrides = data.get("overrides") or []
    if not isinstance(overrides, list):
        raise RecipeError(f"{where}: overrides must be a list, got {overrides!r}")
    made["overrides"] = tuple(
        _override(item, f"{where}: overrides[{index}]") for index, item in enumerate(overrides)
    )
    _check_inputs(data, where)
    made["group_size"] = _group_size(data.get("group_size"), where)
    return Recipe(**{**data, **made, "auto_quantize": auto})


def _group_size(value: Any, where: str) -> tuple[int, ...]:
    sizes = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(size) is int and fits_groups(size) for size in sizes):
        raise RecipeError(
            f"{where}: group_size must be a multiple of {GROUP_MULTIPLE}, or a list of such of "
            f"which the first that fits is taken, got {value!r}"
        )
    return tuple(sizes)


def _override(data: Any, where: str) -> Override:
    if not isinstance(data, dict):
        raise RecipeError(f"{where} must have modules and weights, got {data!r}")
    _check_keys(data, Override, where)
    weights, modules = data.get("weights"), _patterns(data, "modules", where)
    if not isinstance(weights, str) or not modules:
        raise RecipeError(
            f'{where} must have a list of modules, and weights that name a format or are "none", '
            f"got {data!r}"
        )
    _check_inputs(data, where)
    return Override(modules=modules, weights=weights, inputs=data.get("inputs"))


def _check_inputs(data: dict[str, Any], where: str) -> None:
    """Check that a format has the given weights and inputs."""
    given = data.get("inputs")
    if given is None:
        return
    if not isinstance(given, str) or data["weights"] == NO_FORMAT:
        raise RecipeError(f"{where}: inputs must name how they are rounded, got {given!r}")
    try:
        _format_of(data["weights"], given)
    except RecipeError as error:
        raise RecipeError(f"{where}: {error}") from error


def _check_keys(data: dict[str, Any], kind: type[Recipe | Override], where: str) -> None:
    known = {f.name for f in fields(kind)}
    for key in data:
        if key not in known:
            raise RecipeError(
                f"{where}: unknown key {key!r}{near(str(key), known)}; known: "
                f"{', '.join(sorted(known))}"
            )


def _patterns(data: dict[str, Any], key: str, where: str) -> tuple[str, ...]:
    value = data.get(key) or []
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise RecipeError(f"{where}: {key} must be a list of patterns, got {value!r}")
    if not any(":" in pattern or not pattern.strip() for pattern in value):
        return tuple(value)
    from modelopt_lite.offload.patterns import parse_patterns

    try:
        parsed = parse_patterns(value, field=key)
    except OffloadConfigError as error:
        raise RecipeError(f"{where}: {error}") from error
    return tuple(p.text if p.kind == "class" else p.body for p in parsed)
