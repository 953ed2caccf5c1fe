"""The largest magnitudes of what enters matrices, joined over those that share a scale."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from modelopt_lite.checkpoint.names import natural_key
from modelopt_lite.errors import CalibrationError, NonFiniteError
from modelopt_lite.plan import Matrix
from modelopt_lite.words import counted


def amax_of_groups(
    matrices: Sequence[Matrix], seen: Callable[[Matrix], Sequence[Tensor]]
) -> dict[str, Tensor]:
    """Return the largest magnitude that entered each input group, over all of its members.

    Args:
        matrices: Those of one unit; matrices without an input group do not count.
        seen: Returns what is known of a matrix, 0-d tensors: one for each site that saw anything.

    Raises:
        CalibrationError: Nothing entered a group, nor its peers among the experts.
        NonFiniteError: Inputs became NaN or infinite.
    """
    amax: dict[str, Tensor] = {}
    for matrix in matrices:
        if matrix.input_group is None:
            continue
        for own in seen(matrix):
            before = amax.get(matrix.input_group)
            amax[matrix.input_group] = own if before is None else torch.maximum(before, own)
    for matrix in matrices:
        if matrix.input_group is None:
            continue
        value = amax.get(matrix.input_group)
        if value is None and (found := _of_peers(matrix, matrices, amax)):
            value = amax[matrix.input_group] = torch.stack(found).max()
        if value is None:
            raise _unreached([m for m in matrices if m.input_group not in {None, *amax}])
        if not bool(torch.isfinite(value)):
            raise NonFiniteError(
                f"the inputs of {matrix.name!r} became NaN or infinite during calibration; "
                "exclude it in the recipe, or run the model in a wider dtype"
            )
    return amax


def _of_peers(
    matrix: Matrix, matrices: Sequence[Matrix], amax: Mapping[str, Tensor]
) -> list[Tensor]:
    """What entered the same projection of other experts, for an expert that saw nothing."""
    role = matrix.name.rpartition(".")[2]
    groups = {
        str(m.input_group)
        for m in matrices
        if m.experts and m.experts == matrix.experts and m.name.rpartition(".")[2] == role
    }
    return [amax[group] for group in sorted(groups & amax.keys())]


def _unreached(matrices: Sequence[Matrix]) -> CalibrationError:
    """The error for matrices of one unit whose inputs were never seen."""
    first = matrices[0]
    parents = {m.name.rpartition(".")[0].removeprefix(f"{m.unit}.") for m in matrices}
    patterns = ", ".join(f'"*.{parent}"' for parent in sorted(parents, key=natural_key))
    return CalibrationError(
        f"no calibration data reached {first.name!r} (nor its peers; "
        f"{counted(len(matrices), 'matrix', 'matrices')} of unit {first.unit!r} in all), so its "
        "inputs have no scale. Where the model runs it on other inputs only, as attention to an "
        f"encoder, exclude it in the recipe (exclude: [{patterns}]); else give more calibration "
        "data, or use a recipe without static input scales"
    )
