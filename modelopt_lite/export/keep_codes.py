"""Keep the codes of MXFP4 in NVFP4: both have the same elements, and E4M3 has powers of two.

A block of 32 under ``2**k`` becomes two of 16 under ``2**(k - low)``, with ``scale_2 = 2**low``.
E4M3 has 2**-9 to 2**8. So with ``low = k_max - 8`` every block with ``k >= k_max - 17`` keeps its
codes, and its values to the last bit. A block of smaller numbers gets the scale that fits it, and
is rounded anew within NVFP4's bound; blocks of zeros have no say in ``k_max``.

Shape suffixes: E experts, R rows, K columns, G = K / 32, B blocks of the target in a row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from modelopt_lite.formats import e2m1, mxfp4
from modelopt_lite.formats.base import E2M1_MAX, E4M3_MIN_SUBNORMAL
from modelopt_lite.formats.linear import FORMATS
from modelopt_lite.plan import Matrix

Powers = Callable[[str, bool], Tensor | None]
"""See `modelopt_lite.checkpoint.dequant.DequantizedSource.powers`."""

_SMALLEST = round(math.log2(E4M3_MIN_SUBNORMAL))
# So that scale_2 is as `nvfp4.weight_scale_2` would have it at the least, and its amax is finite.
_LOW, _HIGH = -117, 114


@dataclass(frozen=True, slots=True)
class Kept:
    """Scales under which a matrix keeps its codes.

    Attributes:
        amax: float32 [], gives ``scale_2``.
        scale_amax: float32 [(E,) R, B], what a code of 6 stands for in each block.
    """

    amax: Tensor
    scale_amax: Tensor


def kept_scales(
    matrices: Iterable[Matrix], values: Mapping[str, Tensor], powers: Powers
) -> dict[str, Kept]:
    """Return the scales of matrices that can keep their codes, by name.

    Matrices that share ``scale_2`` keep their codes together or not at all.

    Args:
        matrices: Those of one unit.
        values: Matrix -> values [(E,) R, K].
        powers: See `Powers`.
    """
    groups: dict[str, list[Matrix]] = {}
    for matrix in matrices:
        groups.setdefault(matrix.weight_group, []).append(matrix)
    kept: dict[str, Kept] = {}
    for members in groups.values():
        exponents: dict[str, Tensor] = {}
        for matrix in members:
            own = _exponents(matrix, powers)
            if own is None:
                break
            exponents[matrix.name] = own
        else:
            kept |= _scales_of_group(members, values, exponents)
    return kept


def keep_signs_of_zeros(packed: Tensor, w: Tensor) -> Tensor:
    """Return codes in which zeros have the signs of the values, [(E,) R, K / 2] for [(E,) R, K].

    Values of a matrix that was not in four bits before have no zeros whose sign means anything, and
    get code 0 for either.
    """
    signs = ((w == 0) & torch.signbit(w)).to(torch.uint8) << 3
    return packed | e2m1.pack(signs)


def _exponents(matrix: Matrix, powers: Powers) -> Tensor | None:
    """Return the exponent of each 32 values of a matrix in MXFP4 that shall be in NVFP4."""
    if FORMATS[matrix.format].codec.element != "nvfp4":
        return None
    found = powers(matrix.source, matrix.input_major)
    if found is None or not matrix.region:
        return found
    region = matrix.region
    if matrix.input_major and len(region) == 3:  # of [E, in, out]; exponents are [E, out, G]
        region = (region[0], region[2], region[1])
    if len(region) == found.ndim and region[-1] != slice(None):  # it cuts through blocks
        return None
    return found[region]


def _scales_of_group(
    members: list[Matrix], values: Mapping[str, Tensor], exponents: Mapping[str, Tensor]
) -> dict[str, Kept]:
    codec = FORMATS[members[0].format].codec
    assert codec.block is not None
    per = mxfp4.BLOCK // codec.block
    own = {m.name: codec.scale_amax(values[m.name]) for m in members}
    wide = {name: e.repeat_interleave(per, dim=-1) for name, e in exponents.items()}
    largest = [wide[name][amax > 0].amax() for name, amax in own.items() if bool((amax > 0).any())]
    if not largest:
        return {}
    top = math.floor(math.log2(codec.scale_limit))
    low = int(torch.stack(largest).max()) - top
    if not _LOW <= low <= _HIGH:
        return {}
    shared = torch.tensor(codec.reach) * 2.0**low
    kept = {}
    for name, amax in own.items():
        fits = (wide[name] - low >= _SMALLEST) & (amax > 0)
        exact = torch.ldexp(torch.tensor(E2M1_MAX), wide[name].float())
        kept[name] = Kept(shared, torch.where(fits, exact, amax))
    return kept
