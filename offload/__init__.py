"""Run a model whose weights do not fit: bring them in unit by unit, from disk or host memory.

Imported as ``modelopt_lite.offload``. `Lockstep` advances many batches through a model together,
so that each unit's weights are brought in once for all of them.
"""

from __future__ import annotations

if __name__ == "offload":
    raise ImportError(
        "import modelopt_lite.offload, not offload: the folder at the top of the checkout is the "
        "same package under another name, and two copies of it would be made"
    )

from modelopt_lite.offload.lockstep import Lockstep
from modelopt_lite.offload.units import Unit, WeightStore, find_units

__all__ = ["Lockstep", "Unit", "WeightStore", "find_units"]
