"""The algorithms that choose scales, and their options, as recipes name them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from modelopt_lite.errors import RecipeError
from modelopt_lite.words import near

Option = float | int | bool

METHODS: dict[str, dict[str, Option]] = {
    "max": {},
    "smoothquant": {"alpha": 1.0},
    "awq_lite": {"alpha_step": 0.1},
    "awq_clip": {"min_clip_ratio": 0.5, "shrink_step": 0.05},
    "awq_full": {"alpha_step": 0.1, "min_clip_ratio": 0.5, "shrink_step": 0.05},
    "act_headroom": {"anchor_percentile": 1.0, "upper_percentile": 99.99, "rho": 16384.0},
    "gptq": {"perc_damp": 0.01, "block_size": 128},
    "local_hessian": {},
    "svdquant": {"lowrank": 32, "alpha_step": 0.1},
    "mse": {
        "fp8_scale_sweep": False,
        "start_multiplier": 0.25,
        "stop_multiplier": 4.0,
        "step_size": 0.1,
    },
}
"""Method -> its options, with the values that they have where a recipe gives none."""

OTHER_NAMES = {"nvfp4_act_headroom": "act_headroom"}
"""What Model Optimizer calls a method -> its name here, where the two differ."""

SMOOTHING = frozenset({"smoothquant", "awq_lite", "awq_full", "svdquant"})
"""Methods that scale the input channels of weights, and inputs by the inverse."""

_DATA_FREE = frozenset({"max", "mse"})


@dataclass(frozen=True, slots=True, kw_only=True)
class AlgorithmChoice:
    """How scales are chosen.

    Attributes:
        method: A key of ``METHODS``.
        options: Every option of the method.
    """

    method: str = "max"
    options: dict[str, Option] = field(default_factory=dict)

    @property
    def needs_inputs(self) -> bool:
        """Whether it looks at what enters matrices, beyond the largest magnitude."""
        return self.method not in _DATA_FREE

    @property
    def smooths(self) -> bool:
        """Whether it scales input channels."""
        return self.method in SMOOTHING

    @property
    def sets_inputs(self) -> bool:
        """Whether it chooses the scales of inputs."""
        return self.method == "act_headroom"

    @property
    def rank(self) -> int:
        """Rank of the low-rank factors that it keeps apart; 0 where it keeps none."""
        return int(self.options.get("lowrank", 0))


def parse_algorithm(data: Any, *, where: str) -> AlgorithmChoice:
    """Return what ``algorithm:`` asks for: a method's name, or ``method`` and options.

    Raises:
        RecipeError: No such method or option, or a value of another type.
    """
    if isinstance(data, AlgorithmChoice):
        return data
    if isinstance(data, str):
        data = {"method": data}
    if not isinstance(data, Mapping) or not isinstance(data.get("method"), str):
        raise RecipeError(
            f"{where}: algorithm must be a name, or a mapping with method and options, got {data!r}"
        )
    method = str(data["method"])
    method = OTHER_NAMES.get(method, method)
    if method not in METHODS:
        raise RecipeError(
            f"{where}: unknown algorithm {method!r}{near(method, METHODS)}; known: "
            f"{', '.join(sorted(METHODS))}"
        )
    options = dict(METHODS[method])
    for key, value in data.items():
        if key == "method":
            continue
        if key not in options:
            raise RecipeError(
                f"{where}: the algorithm {method!r} has no option {key!r}{near(key, options)}; "
                f"it has: {', '.join(options) or 'none'}"
            )
        options[key] = _checked(key, value, options[key], where)
    return AlgorithmChoice(method=method, options=options)


def _checked(key: str, value: Any, default: Option, where: str) -> Option:
    kinds = (bool,) if isinstance(default, bool) else (int, float)
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        wanted = "true or false" if bool in kinds else "a number"
        raise RecipeError(f"{where}: algorithm.{key} must be {wanted}, got {value!r}")
    if bool not in kinds and not value >= 0:
        raise RecipeError(f"{where}: algorithm.{key} must be 0 or more, got {value!r}")
    return type(default)(value)
