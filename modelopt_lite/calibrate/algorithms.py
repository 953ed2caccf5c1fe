"""The algorithms by the names that recipes give them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from modelopt_lite.calibrate.algorithm import Algorithm
from modelopt_lite.calibrate.awq import AWQLite
from modelopt_lite.calibrate.clip import AWQClip, AWQFull
from modelopt_lite.calibrate.gptq import GPTQ
from modelopt_lite.calibrate.headroom import ActHeadroom
from modelopt_lite.calibrate.local_hessian import LocalHessian
from modelopt_lite.calibrate.mse import MeanSquaredError
from modelopt_lite.calibrate.smoothquant import SmoothQuant
from modelopt_lite.calibrate.svdquant import SVDQuant
from modelopt_lite.errors import RecipeError
from modelopt_lite.formats.base import Numerics
from modelopt_lite.formats.linear import FORMATS, LinearFormat
from modelopt_lite.recipes.algorithms import AlgorithmChoice

_MADE: dict[str, Callable[..., Algorithm]] = {
    "act_headroom": ActHeadroom,
    "smoothquant": SmoothQuant,
    "awq_lite": AWQLite,
    "awq_clip": AWQClip,
    "awq_full": AWQFull,
    "gptq": GPTQ,
    "local_hessian": LocalHessian,
    "mse": MeanSquaredError,
    "svdquant": SVDQuant,
}


def make_algorithm(choice: AlgorithmChoice, numerics: Numerics) -> Algorithm | None:
    """Return the algorithm that a recipe asks for, None where largest magnitudes are all."""
    options: dict[str, Any] = dict(choice.options)
    return None if choice.method == "max" else _MADE[choice.method](numerics, **options)


def check_formats(
    choice: AlgorithmChoice, numerics: Numerics, formats: Iterable[LinearFormat]
) -> list[str]:
    """Check that an algorithm has something to choose in the formats of what is quantized.

    Returns:
        Notes on formats that it leaves at the scales of their largest magnitudes.

    Raises:
        RecipeError: It has nothing to choose in any of them; or in one, where it scales what
            matrices of several formats read.
    """
    formats, algorithm = list(formats), make_algorithm(choice, numerics)
    if algorithm is None:
        return []
    problems = {fmt.name: problem for fmt in formats if (problem := algorithm.problem(fmt))}
    if problems and (choice.smooths or len(problems) == len(formats)):
        name, problem = next(iter(problems.items()))
        fitting = [fmt.name for fmt in FORMATS.values() if algorithm.problem(fmt) is None]
        raise RecipeError(
            f"the algorithm {choice.method!r} does nothing for the format {name!r}: {problem}; "
            f'take "max", which is what it would come to, or a format of {", ".join(fitting)}'
        )
    return [
        f"the algorithm {choice.method!r} leaves {name} at the scales of the largest magnitudes: "
        f"{problem}"
        for name, problem in problems.items()
    ]


def check_stacks(
    choice: AlgorithmChoice, numerics: Numerics, stacks: Mapping[str, LinearFormat]
) -> None:
    """Refuse to search scales that would lie along another axis than products do.

    Args:
        choice: The algorithm.
        numerics: ``modelopt`` has the peer's layout of stacks.
        stacks: Stacks that lie [E, in, out] on disk, and their formats.

    Raises:
        RecipeError: The blocks of one run along ``out``, and scales are searched.
    """
    algorithm = make_algorithm(choice, numerics)
    if algorithm is None or choice.smooths:  # nothing is chosen of blocks
        return
    for name, fmt in stacks.items():
        if not fmt.turns(True, numerics) and algorithm.problem(fmt) is None:
            raise RecipeError(
                f"{name!r}: numerics={numerics!r} has blocks of {fmt.name} along the last axis "
                f"as stored, and {choice.method!r} chooses scales along what is multiplied; take "
                'the algorithm "max", or numerics="exact"'
            )
