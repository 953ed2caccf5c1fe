"""Statistics of what enters weights, beyond its largest magnitude.

Every sum is taken call by call, in the order in which a site is called: that order is the order of
the calibration batches, however the model is scheduled, and so the bits are always the same.

Shape suffixes: T rows (tokens), K columns (input channels), B = K / 16 blocks of columns.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from modelopt_lite.calibrate.observe import Site
from modelopt_lite.errors import CalibrationError

_BLOCK = 16
_BINS = 512
LOG2_RANGE = (-40.0, 40.0)
"""What the bins of a histogram of magnitudes span; smaller and larger ones are in the end bins."""
Kind = Literal["channels", "rows", "gram", "blocks", "histogram"]


@dataclass(slots=True)
class Seen:
    """What entered one site.

    Attributes:
        calls: How often it was called with at least one row.
        count: Rows in all.
        amax: [K], the largest magnitude of each channel, in the dtype of the inputs.
        mean: [K], the sum over calls of the channels' mean magnitudes, float32.
        sum: [K], the sum over rows of the channels' magnitudes, float32.
        rows: Some of the rows, call by call, each [T, K]; at most ``limit`` in all.
        gram: [K, K], the mean over rows of ``2 * x * x.T``, float32.
        blocks: [B, 16, 16], the sum over rows of ``x * x.T`` of each block, float32.
        stride: Of the rows seen, every ``stride``-th was kept.
        histogram: int64 [512], how many blocks of 16 channels had a largest magnitude in each bin
            of log2 over ``LOG2_RANGE``; blocks of zeros are not counted.
        largest: The largest magnitude of all, in the dtype of the inputs.
    """

    calls: int = 0
    count: int = 0
    amax: Tensor | None = None
    mean: Tensor | None = None
    sum: Tensor | None = None
    rows: list[Tensor] = field(default_factory=list)
    gram: Tensor | None = None
    blocks: Tensor | None = None
    stride: int = 1
    histogram: Tensor | None = None
    largest: Tensor | None = None

    def add_histogram(self, x_TK: Tensor) -> None:
        """Count blocks by their largest magnitudes."""
        amax_N = x_TK.abs().contiguous().view(-1, _BLOCK).amax(-1)
        largest = amax_N.max()
        self.largest = largest if self.largest is None else torch.maximum(self.largest, largest)
        bins_N = histogram_bins(amax_N[amax_N > 0].float())
        counts_H = torch.bincount(bins_N, minlength=_BINS)
        self.histogram = counts_H if self.histogram is None else self.histogram.add_(counts_H)

    def add_channels(self, x_TK: Tensor) -> None:
        """Add to the statistics of channels."""
        size_TK = x_TK.abs()
        amax_K, mean_K = size_TK.amax(0), size_TK.mean(0).float()
        sum_K = size_TK.sum(0, dtype=torch.float32)
        if self.amax is None or self.mean is None or self.sum is None:
            self.amax, self.mean, self.sum = amax_K, mean_K, sum_K
            return
        self.amax = torch.maximum(self.amax, amax_K)
        self.mean += mean_K
        self.sum += sum_K

    def add_gram(self, x_TK: Tensor) -> None:
        """Add to the mean of products."""
        count = self.count + len(x_TK)
        scaled_KT = math.sqrt(2 / count) * x_TK.T.float()
        if self.gram is None:
            self.gram = scaled_KT @ scaled_KT.T
        else:
            self.gram.mul_(self.count / count).add_(scaled_KT @ scaled_KT.T)

    def add_blocks(self, x_TK: Tensor) -> None:
        """Add to the products within blocks."""
        x_BST = x_TK.float().T.reshape(-1, _BLOCK, len(x_TK))
        products = x_BST @ x_BST.transpose(-1, -2)
        self.blocks = products if self.blocks is None else self.blocks.add_(products)

    def add_rows(self, x_TK: Tensor, limit: int | None) -> None:
        """Keep some rows; past the limit every other one is dropped, and fewer are taken."""
        first = -self.count % self.stride
        self.rows.append(x_TK[first :: self.stride].clone())
        while limit is not None and sum(map(len, self.rows)) > limit:
            kept, position = [], 0
            for part in self.rows:
                kept.append(part[position % 2 :: 2].clone())
                position += len(part)
            self.rows = [part for part in kept if len(part)]
            self.stride *= 2


def histogram_bins(size: Tensor) -> Tensor:
    """Return the bins of magnitudes > 0, float32 of any shape, as int64."""
    low, high = LOG2_RANGE
    return ((size.log2() - low) / (high - low) * _BINS).floor().long().clamp_(0, _BINS - 1)


class Statistics:
    """Gathers statistics at some sites; a site may be asked for, and let go, at any time.

    Args:
        kinds: What to gather: "channels" (maxima and means), "rows" (a sample), "gram" (products of
            channels), "blocks" (products within blocks of 16 channels), "histogram" (magnitudes of
            such blocks).
        sites: Where; None for wherever it is called.
        limit: Returns the most rows to keep at a site, None for all.
    """

    def __init__(
        self,
        kinds: Iterable[Kind] = (),
        sites: Iterable[Site] | None = None,
        limit: Callable[[Site], int | None] = lambda site: None,
    ) -> None:
        self._kinds = frozenset(kinds)
        self._sites = None if sites is None else frozenset(sites)
        self._limit = limit
        self._seen: dict[Site, Seen] = {}
        self._gone: set[Site] = set()

    def visit(self, site: Site, x: Tensor, batched: bool) -> None:
        """Take one input into account; see `InputWatch`."""
        if batched:
            for expert, x_expert in enumerate(x.unbind(0)):
                self.visit(Site(site.entry, expert), x_expert, False)
            return
        if not self._kinds or not x.numel():
            return
        if self._sites is not None and site not in self._sites:
            return
        if site in self._gone:
            raise CalibrationError(
                f"{site.entry!r} is used again after its layer was finished: the layer runs more "
                "than once, and this algorithm needs all inputs of a layer at one time; use a "
                "recipe with algorithm: max for this model"
            )
        seen = self._seen.setdefault(site, Seen())
        x_TK = x.detach().reshape(-1, x.shape[-1])
        if "channels" in self._kinds:
            seen.add_channels(x_TK)
        if "rows" in self._kinds:
            seen.add_rows(x_TK, self._limit(site))
        if "gram" in self._kinds:
            seen.add_gram(x_TK)
        if "blocks" in self._kinds:
            seen.add_blocks(x_TK)
        if "histogram" in self._kinds:
            seen.add_histogram(x_TK)
        seen.calls += 1
        seen.count += len(x_TK)

    def wants(self, site: Site) -> bool:
        """Whether anything is gathered at a site."""
        return bool(self._kinds) and (self._sites is None or site in self._sites)

    def put(self, site: Site, seen: Seen) -> None:
        """Take what another process saw of a site."""
        self._seen[site] = seen

    def at(self, site: Site) -> Seen | None:
        """Return what entered a site, None where nothing did."""
        return self._seen.get(site)

    def drop(self, sites: Iterable[Site]) -> None:
        """Forget sites whose layer is finished."""
        for site in sites:
            self._seen.pop(site, None)
            self._gone.add(site)
