"""The algorithms by the names that recipes give them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from modelopt_lite.calibrate.algorithm import Algorithm
from modelopt_lite.calibrate.awq import AWQLite
from modelopt_lite.calibrate.clip import AWQClip, AWQFull
from modelopt_lite.calibrate.gptq import GPTQ
from modelopt_lite.calibrate.local_hessian import LocalHessian
from modelopt_lite.calibrate.mse import MeanSquaredError
from modelopt_lite.calibrate.smoothquant import SmoothQuant
from modelopt_lite.calibrate.svdquant import SVDQuant
from modelopt_lite.formats.base import Numerics
from modelopt_lite.recipes.algorithms import AlgorithmChoice

_MADE: dict[str, Callable[..., Algorithm]] = {
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
