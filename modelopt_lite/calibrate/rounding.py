"""Round the inputs of a quantized checkpoint's layers as the kernels of an engine do.

A simulation: the rounded inputs are multiplied in the model's dtype, where an engine multiplies the
codes themselves and adds up in float32. The two differ by the rounding of products.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from modelopt_lite.calibrate.observe import Site
from modelopt_lite.checkpoint.dequant import DequantizedSource
from modelopt_lite.checkpoint.names import NameMap, Region
from modelopt_lite.errors import CheckpointError
from modelopt_lite.formats.linear import LinearFormat
from modelopt_lite.formats.smoothed import kept_product


@dataclass(frozen=True, slots=True)
class _Kept:
    """Low-rank factors, a [L, K] and b [R, L] or stacks of them, and the outputs they belong to."""

    a: Tensor
    b: Tensor
    rows: slice

    def add(self, product: Tensor, x: Tensor, expert: int | None) -> None:
        """Add to a product [..., R'] what the factors make of x [..., K] or [E, ..., K]."""
        a, b = self.a, self.b
        if a.ndim == 3 and expert is not None:
            a, b = a[expert], b[expert]
        flat = x.reshape(*a.shape[:-2], -1, x.shape[-1])
        part = product[..., self.rows]
        part += kept_product(flat, a, b).view(part.shape).to(part.dtype)


@dataclass(frozen=True, slots=True)
class _Beside:
    """The scale of input channels of a site, float32 [K] or None, and its factors."""

    scale: Tensor | None
    kept: tuple[_Kept, ...]


class InputRounding:
    """Rounds what enters each quantized matrix, as a checkpoint in one of our dialects says.

    The format is that which the checkpoint states for the matrix, and a static scale comes from its
    ``input_scale`` tensors. Experts that share a parameter have a site each. Where several tensors
    on disk make up one matrix of the model, the largest of their scales holds, as in engines, which
    fuse them, too. Where the checkpoint states no format of ours, nothing is rounded.

    Inputs with a scale of their channels are rounded under it, and divided by it again: the weights
    that are read contain it. What low-rank factors multiply is not rounded.

    Args:
        source: The quantized checkpoint.
        names: Its correspondence with the model.
        device: Where the model runs.

    Raises:
        CheckpointError: A quantized matrix lacks the scale that its format needs.
    """

    def __init__(self, source: DequantizedSource, names: NameMap, device: torch.device) -> None:
        self._source = source
        self._device = device
        self._formats: dict[Site, LinearFormat] = {}
        self._scales: dict[Site, Tensor] = {}
        self._smoothed: dict[Site, list[tuple[str, Region]]] = {}
        self._read: dict[Site, _Beside] = {}
        for site, name, rows in _sites(source, names):
            encoded = source.encoded[name]
            fmt = encoded.served
            if fmt is None:
                continue
            self._formats[site] = fmt
            if encoded.smoothing is not None or encoded.factors:
                self._smoothed.setdefault(site, []).append((name, rows))
            if not fmt.static_input:
                continue
            module = name.removesuffix(".weight")
            if module not in source.input_scales:
                raise CheckpointError(
                    f"{source.path}: the quantized {module!r} has no input_scale, which "
                    f"{fmt.quant_algo} needs; restore it, or leave its inputs alone with "
                    "activations=False"
                )
            scale = torch.tensor(source.input_scales[module], dtype=torch.float32, device=device)
            before = self._scales.get(site)
            self._scales[site] = scale if before is None else torch.maximum(before, scale)

    @property
    def entries(self) -> set[str]:
        """Parameters of the model whose inputs are rounded."""
        return {site.entry for site in self._formats}

    def forget(self, entries: Iterable[str]) -> None:
        """Let go of what was read for parameters that leave the model."""
        gone = set(entries)
        self._read = {site: kept for site, kept in self._read.items() if site.entry not in gone}

    def visit(self, site: Site, x: Tensor, batched: bool) -> Tensor | None:
        """Return ``x`` rounded, in its shape and dtype; an `InputWatch` calls it."""
        if not x.numel():
            return None
        known = self._known(site)
        if known is not None:
            return self._rounded(known, x)
        if not batched:
            return None
        parts = [(self.visit(Site(site.entry, e), x_e, False), x_e) for e, x_e in enumerate(x)]
        return torch.stack([x_e if rounded is None else rounded for rounded, x_e in parts])

    def amend(
        self, site: Site, x: Tensor, rounded: Tensor, product: Tensor, batched: bool
    ) -> Tensor:
        """Return a product with what factors make of that by which inputs were rounded."""
        known = self._known(site)
        if known is None:
            for e, parts in enumerate(zip(x, rounded, product, strict=True) if batched else ()):
                self.amend(Site(site.entry, e), *parts, False)
            return product
        beside = self._beside(known)
        if beside is None or not beside.kept:
            return product
        lost = x.float() - rounded.float()
        if beside.scale is not None:
            lost = lost * beside.scale
        for kept in beside.kept:
            kept.add(product, lost, site.expert)
        return product

    def _known(self, site: Site) -> Site | None:
        return next((s for s in (site, Site(site.entry)) if s in self._formats), None)

    def _rounded(self, site: Site, x: Tensor) -> Tensor | None:
        fmt, scale, beside = self._formats[site], self._scales.get(site), self._beside(site)
        if not fmt.inputs.rounds:
            return None
        if beside is None or beside.scale is None:
            return fmt.fake_quantize_input(x, scale)
        scaled = x * beside.scale.to(x.dtype)
        return (fmt.fake_quantize_input(scaled.float(), scale) / beside.scale).to(x.dtype)

    def _beside(self, site: Site) -> _Beside | None:
        """Return what stands beside the codes of a site, read when it is first asked for."""
        if site not in self._smoothed:
            return None
        if site not in self._read:
            scale: Tensor | None = None
            kept: list[tuple[tuple[Tensor, ...], Region]] = []
            for name, rows in self._smoothed[site]:
                own, factors = self._source.beside(name)
                own = None if own is None else own.float().to(self._device)
                if kept and not _equal(own, scale):
                    raise CheckpointError(
                        f"{self._source.path}: {name!r} and {self._smoothed[site][0][0]!r} make up "
                        "one matrix of the model, and the scales of their inputs' channels differ; "
                        "leave inputs alone with activations=False"
                    )
                scale = own
                kept.append((factors, rows))
            self._read[site] = _Beside(scale, tuple(self._kept(kept)))
        return self._read[site]

    def _kept(self, found: list[tuple[tuple[Tensor, ...], Region]]) -> Iterator[_Kept]:
        for factors, rows in found:
            if factors:
                a, b = (factor.to(self._device) for factor in factors)
                last = rows[-1] if rows else slice(None)
                yield _Kept(a, b, last if isinstance(last, slice) else slice(None))


def _equal(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return torch.equal(one, other)


def _sites(source: DequantizedSource, names: NameMap) -> Iterator[tuple[Site, str, Region]]:
    """Yield where each quantized tensor on disk is multiplied in the model, and its part there."""
    for group in names.groups:
        regions = {piece.source: piece.region for piece in group.pieces}
        for name in group.sources:
            if name not in source.encoded:
                continue
            region = regions.get(name, ())
            expert = region[0] if region and isinstance(region[0], int) else None
            for target in group.targets:
                yield Site(target, expert), name, region
