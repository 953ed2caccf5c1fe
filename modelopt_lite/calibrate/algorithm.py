"""What an algorithm that chooses scales is. Each has a module of its own beside this one.

An algorithm sees one group of matrices at a time: all that read the same tensor, in one layer. What
entered them is final, and the layer is in memory. It says, for each matrix, what becomes of it
before it is quantized.

Shape suffixes: R rows (output channels), K columns (input channels).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from modelopt_lite.calibrate.observe import Site
from modelopt_lite.calibrate.statistics import Kind, Seen
from modelopt_lite.formats.base import Numerics
from modelopt_lite.formats.linear import LinearFormat


@dataclass(frozen=True, slots=True)
class Weight:
    """A matrix as an algorithm sees it.

    Attributes:
        name: The matrix's name in the export; experts of a stack share it.
        expert: Which expert of a stack, else None.
        format: Its format.
        together: Matrices with the same value share a scale of the whole matrix.
        site: Where what it reads is seen; matrices that read the same tensor have one site.
        seen: What entered there, None where nothing did.
        amax: [K], the largest magnitude of each channel of its inputs, None where nothing was seen.
        read: Returns its values [R, K] in the dtype on disk, never to be written.
        own: Whether they are at hand; else another process has them, and ``seen`` has no rows.
    """

    name: str
    expert: int | None
    format: LinearFormat
    together: str
    site: Site
    seen: Seen | None
    amax: Tensor | None
    read: Callable[[], Tensor]
    own: bool = True

    @property
    def role(self) -> str:
        """The last part of its name."""
        return self.name.rpartition(".")[2]

    @property
    def key(self) -> tuple[str, int | None]:
        """What tells it from others."""
        return self.name, self.expert


Step = Callable[[Tensor], Tensor]
Each = Callable[[Sequence[Weight], Callable[[Weight], Any]], list[Any]]
"""Does some work for each of several matrices, and returns what it gave, in their order."""


def here(weights: Sequence[Weight], work: Callable[[Weight], Any]) -> list[Any]:
    """Do it all in this process."""
    return [work(weight) for weight in weights]


@dataclass(slots=True)
class Choice:
    """What becomes of a matrix before it is quantized.

    Attributes:
        pre_quant_scale: [K] in the dtype of the matrix; inputs are multiplied by it. All of a
            group have the same.
        steps: Each scales the columns of the matrix and rounds, one after another.
        input_amax: Largest magnitude of the inputs times ``pre_quant_scale``, a 0-d tensor; None
            where nothing was seen.
        scale_amax: What each scale of the matrix stands for; None for the largest magnitudes.
        own_scale: [K], what the matrix alone would be scaled by, where that differs.
        extras: Further tensors of the matrix in the export, by suffix.
        replaces: ``steps`` give other values, not scaled ones.
        amax: What the scale of the whole stands for; of matrices that share it, the largest counts.
    """

    pre_quant_scale: Tensor | None = None
    steps: tuple[Step, ...] = ()
    input_amax: Tensor | None = None
    scale_amax: Tensor | None = None
    amax: Tensor | None = None
    own_scale: Tensor | None = None
    extras: dict[str, Tensor] = field(default_factory=dict)
    replaces: bool = False


Choices = dict[tuple[str, int | None], Choice]


class Algorithm(ABC):
    """Chooses what becomes of matrices.

    Args:
        numerics: ``modelopt`` takes the choices of Model Optimizer 0.47.

    Attributes:
        kinds: The statistics that it needs.
        sequential: Layers are calibrated on what the quantized layers before them put out.
        rounded: Its statistics are those of a second run of all batches, in which inputs are
            rounded under the scales that the first has found, and weights are not.
        replaces: Choices hold other values of their matrices, until the layer is quantized.
    """

    kinds: frozenset[Kind] = frozenset()
    sequential = False
    rounded = False
    replaces = False

    def __init__(self, numerics: Numerics) -> None:
        self.numerics = numerics

    def row_limit(self, site: Site) -> int | None:
        """Return how many rows to keep at a site, None for all."""
        return None

    def problem(self, fmt: LinearFormat) -> str | None:
        """Return why there is nothing to choose in a format, or no way to; None if there is."""
        return None

    def scratch(self, rows: int, columns: int, seen: int) -> int:
        """Return about how many bytes choosing for a matrix [rows, columns] takes.

        What works on a few rows at a time takes none worth counting.

        Args:
            rows: Of the matrix,
            columns: and its columns.
            seen: Rows of inputs that were kept.
        """
        return 0

    def reads(self, fmt: LinearFormat) -> int:
        """Return how often `choose` reads a matrix of a format, inputs of which were seen."""
        return 1

    @abstractmethod
    def choose(self, weights: Sequence[Weight], each: Each = here) -> Choices:
        """Return what becomes of each of a group of matrices that read the same tensor.

        Args:
            weights: The group; where some are not this process's own, what it returns of them need
                only have the scale that all share, and the amax of inputs.
            each: Does what is done for each matrix alone, where its values are. Only what smooths
                inputs is given another one than `here`.
        """
