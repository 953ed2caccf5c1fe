"""The largest magnitudes of what enters matrices, joined over those that share a scale."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from modelopt_lite.calibrate.evidence import Evidence
from modelopt_lite.calibrate.observe import Site
from modelopt_lite.checkpoint.names import natural_key
from modelopt_lite.errors import CalibrationError, NonFiniteError
from modelopt_lite.formats.linear import FORMATS, LinearFormat
from modelopt_lite.plan import Matrix
from modelopt_lite.words import counted


def sites_of(matrix: Matrix, at: Site) -> list[Site]:
    """Return where the inputs of a matrix, or of each expert of a stack, are seen."""
    if matrix.expert is None and len(matrix.shape) == 3:
        return [Site(at.entry, expert) for expert in range(matrix.shape[0])]
    return [at]


class RoundedRun:
    """A second run of all batches through a layer, whose inputs are rounded under known scales.

    Args:
        matrices: What is quantized.
        evidence: What the first run saw; this one adds to its statistics.
    """

    def __init__(self, matrices: Sequence[Matrix], evidence: Evidence) -> None:
        self._evidence = evidence
        self._formats: dict[Site, LinearFormat] = {}
        self._groups: dict[Site, str] = {}
        self._sites: dict[str, list[Site]] = {}
        for matrix in matrices:
            for site in sites_of(matrix, matrix.site):
                self._formats[site] = FORMATS[matrix.format]
                if matrix.input_group is not None:
                    self._groups[site] = matrix.input_group
                    self._sites.setdefault(matrix.input_group, []).append(site)

    def visit(self, site: Site, x: Tensor, batched: bool) -> Tensor | None:
        """Take one input into account, and return it rounded; an `InputWatch` calls it."""
        if batched:
            parts = [self.visit(Site(site.entry, e), x_e, False) for e, x_e in enumerate(x)]
            pairs = zip(parts, x, strict=True)
            return torch.stack([x_e if rounded is None else rounded for rounded, x_e in pairs])
        self._evidence.statistics.visit(site, x, False)
        fmt = self._formats.get(site)
        if fmt is None or not x.numel() or not fmt.inputs.rounds:
            return None
        return fmt.fake_quantize_input(x, self._scale(site, fmt))

    def _scale(self, site: Site, fmt: LinearFormat) -> Tensor | None:
        if site not in self._groups:
            return None
        known = self._evidence.inputs.amax
        found = [known[s] for s in self._sites[self._groups[site]] if s in known]
        return fmt.input_scale(torch.stack(found).max())


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
